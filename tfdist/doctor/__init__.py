"""Looks a machine over before a run: what is there, what is wrong, which command cures it."""
