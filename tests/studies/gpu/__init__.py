"""Checks that need GPUs: `make test-gpu` on a host that has them prints a table of the results.

`python -m tests.studies.gpu --rehearse` runs the same checks on logical CPU devices
with tiny networks.
"""
