"""Small training questions with one right answer, and who gets them right.

A case (`case.py`, `cases_*.py`) is a compiled model and some data. An engine (`engines.py`) trains
it: plain Keras on one device gives the answer, tfdist and plain Keras over several replicas are
asked for the same. `python -m tests.conformance` prints who differs and by how much.
"""
