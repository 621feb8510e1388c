"""Accuracy against the global batch: what scaling the learning rate and warming it up do."""
