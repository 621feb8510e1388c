"""What to make of examples: `images`, `layers` (Keras layers with seeds), `text`.

A map takes what it needs and returns what it made, so that a recipe's `map_fn` or `augment_fn` is a
few calls one below the other. Images stay uint8 on their way to the device, a quarter of the bytes
of float32; the model normalises them there, in its first layer (`keras.layers.Rescaling` or
`keras.layers.Normalization`), and takes that layer with it when it is exported.
"""
