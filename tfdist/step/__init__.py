"""The mathematics of one global batch."""
