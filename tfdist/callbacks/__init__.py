"""Plain Keras callbacks, one per file. Import each from its own module.

Nothing is imported here, so that the trainer can use the progress bar without matplotlib.
"""
