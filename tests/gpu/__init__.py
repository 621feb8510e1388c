"""What only GPUs can show: `make test-gpu` on a host that has them, with a table at the end.

`python -m tests.gpu --rehearse` runs the same checks on logical CPU devices with tiny networks.
"""
