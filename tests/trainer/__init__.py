"""Tests of `tfdist.Trainer`."""
