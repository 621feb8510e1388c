"""Tests of the order of data."""
