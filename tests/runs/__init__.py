"""Tests of `tfdist.runs`."""
