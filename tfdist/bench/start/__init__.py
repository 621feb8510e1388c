"""`python -m tfdist.bench start`: what a user waits for before the first step, beside Keras's."""
