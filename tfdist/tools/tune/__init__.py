"""`tfdist tune`: finds the batch size, the learning rate or other flags by trials."""
