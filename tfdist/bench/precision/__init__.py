"""`python -m tfdist.bench precision`: speed, memory and accuracy by number format."""
