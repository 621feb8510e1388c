"""The conformance suite: compares every strategy with plain Keras on one device.

A case (`case.py`, `cases_*.py`) is a compiled model and its data. An engine (`engines.py`) trains
it. Plain Keras on one device gives the reference; tfdist, and plain Keras over several replicas,
must match it. `python -m tests.conformance` prints which engines differ, and by how much.
"""
