"""`python -m tfdist.bench step`: what a training step costs, beside Keras's and a loop by hand."""
