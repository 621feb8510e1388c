"""`python -m tfdist.verify`: compares a small training under a strategy with plain Keras."""
