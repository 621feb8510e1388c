"""Checkpoints: what is saved, where it is stored, and how a run resumes."""
