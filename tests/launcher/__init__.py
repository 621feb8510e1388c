"""The tests of tfdist.launcher."""
