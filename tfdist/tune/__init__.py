"""`python -m tfdist.tune`: finds a batch size, a learning rate or other flags by trying."""
