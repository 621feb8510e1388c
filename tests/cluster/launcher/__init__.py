"""Tests of tfdist.cluster.launcher."""
