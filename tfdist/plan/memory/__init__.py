"""`python -m tfdist.plan memory`: what a device has to hold, from the graph of the real step."""
