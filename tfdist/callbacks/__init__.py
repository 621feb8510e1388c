"""Plain Keras callbacks, one per file; each is imported from its own module.

Nothing is imported here: the trainer needs the progress line, and not matplotlib.
"""
