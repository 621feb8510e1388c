"""Tests of `tfdist.tools`."""
