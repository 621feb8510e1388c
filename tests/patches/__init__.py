"""Tests of `tfdist.patches`."""
