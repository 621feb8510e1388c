"""`python -m tfdist.tune`: finds a batch size or a learning rate by trying."""
