"""Tests of tfdist.launcher."""
