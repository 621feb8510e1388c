"""The tests of tfdist.clusters."""
