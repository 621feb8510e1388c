"""Activations that are not kept for the way back, but computed again: `keras.remat`, exactly.

Of a layer that is computed again only its inputs are kept (Chen et al. 2016, "Training Deep Nets
with Sublinear Memory Cost"). The second time it finds all variables as it found them the first:
random layers draw the same numbers. What it assigns, and the losses that it adds, count once.
"""
