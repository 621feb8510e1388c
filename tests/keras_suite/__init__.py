"""Runs Keras's test suite for its trainer and callbacks through tfdist's Trainer."""
