"""`python -m tfdist.verify`: trains a small network and compares it with plain Keras's."""
