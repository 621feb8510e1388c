"""`tfdist verify`: compares a small training run under a strategy with plain Keras."""
