"""`python -m tfdist.bench scaling`: what a second process on a second core brings."""
