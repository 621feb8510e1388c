"""Tests of tfdist.cluster."""
