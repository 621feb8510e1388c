"""Tests of `tfdist.tools.runs`."""
