"""`python -m tfdist.bench all`: every benchmark, one after the other."""
