"""Functions to process examples: `images`, `layers` (Keras layers with seeds) and `text`.

A `map_fn` or `augment_fn` calls a few of these functions one after the other. Images stay uint8
until they are on the device, which takes a quarter of the bytes of float32. The model normalizes
them in its first layer (`keras.layers.Rescaling` or `keras.layers.Normalization`), so that an
exported model includes the normalization.
"""
