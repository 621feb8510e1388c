import sys

import keras
from sklearn.datasets import load_digits

import tfdist


def build_model():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return model


keras.utils.set_random_seed(1)
strategy = sys.argv[1] if len(sys.argv) > 1 else "mirrored"
devices = 2 if strategy == "mirrored" else None
trainer = tfdist.Trainer(build_model, strategy=strategy, devices=devices)
x, y = load_digits(return_X_y=True)
trainer.fit(x / 16, y, batch_size=100, epochs=5, verbose=2)
trainer.model.save("model.keras")  # a plain Keras model
