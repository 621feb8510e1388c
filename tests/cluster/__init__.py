"""The tests of tfdist.cluster."""
