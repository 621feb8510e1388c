"""Keras's own tests of its trainer and callbacks, asked of tfdist's Trainer: see `__main__.py`."""
