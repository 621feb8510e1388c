"""Tests of `tfdist.rows`."""
