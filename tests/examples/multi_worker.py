"""The model of TensorFlow's tutorial "Multi-worker training with Keras", with tfdist.

    python -m tfdist.launch --num-workers 2 -- python tests/examples/multi_worker.py model.keras

or with the tutorial's TF_CONFIG, once for each worker. No process splits the data: the global
batch grows with the workers, and each gets its rows.
"""

from __future__ import annotations

import sys

import images
import keras

import tfdist


def build_model() -> keras.Model:
    """Returns the tutorial's small convolutional network, compiled."""
    layers = [
        keras.Input((28, 28, 1)),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(10),
    ]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.02, momentum=0.5), loss, metrics=["accuracy"])
    return model


trainer = tfdist.Trainer(build_model, strategy="multi_worker")
x, y = images.load()
history = trainer.fit(x, y, batch_size=64 * tfdist.size(), epochs=3, verbose=0)
print(f"rank {tfdist.rank()} of {tfdist.size()}: accuracy {history.history['accuracy'][-1]:.6f}")
if tfdist.is_chief():
    trainer.model.save(sys.argv[1])
