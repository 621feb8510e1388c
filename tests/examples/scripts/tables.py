"""Two models in one script, each with two inputs and two outputs."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(3)
random = np.random.default_rng(3)
sizes = random.random((150, 3), "float32")
kinds = random.integers(0, 5, (150, 1))
prices = sizes.sum(1, keepdims=True) + 0.2 * kinds.astype("float32")
is_large = (sizes[:, 0] > 0.5).astype("float32")[:, None]


def build(width):
    numbers, kind = keras.Input((3,), name="sizes"), keras.Input((1,), name="kinds")
    x = layers.Concatenate()([numbers, layers.Flatten()(layers.Embedding(5, 2)(kind))])
    x = layers.Dropout(0.1)(layers.Dense(width, activation="relu")(x))
    price, large = layers.Dense(1, name="price")(x), layers.Dense(1, name="large")(x)
    model = keras.Model({"sizes": numbers, "kinds": kind}, {"price": price, "large": large})
    model.compile(
        keras.optimizers.Adam(0.01, epsilon=1e-2),
        {"price": "mse", "large": keras.losses.BinaryCrossentropy(from_logits=True)},
        loss_weights={"price": 1.0, "large": 0.5},
        metrics={"price": ["mae"]},
    )
    return model


for width in (8, 16):
    model = build(width)
    trainer = model
    history = trainer.fit(
        {"sizes": sizes, "kinds": kinds},
        {"price": prices, "large": is_large},
        batch_size=32,
        epochs=2,
        validation_split=0.2,
        verbose=0,
    )
    for name, values in history.history.items():
        print("metric", width, name, *(f"{value:.4f}" for value in values))
