"""Checkpoints of a training: what is saved, where it lies, and how a training goes on from it."""
