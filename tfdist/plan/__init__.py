"""`python -m tfdist.plan`: what a training will take, before anything is spent on it."""
