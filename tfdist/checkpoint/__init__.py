"""Checkpoints: what is saved of a training, where it is stored, and how a training resumes."""
