"""The tests of tfdist.cluster.environments."""
