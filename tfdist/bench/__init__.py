"""Measurements of tfdist itself: `python -m tfdist.bench NAME`; one module or folder for each."""
