"""Classifies small images, with four callbacks."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(1)
random = np.random.default_rng(1)
images = random.random((200, 8, 8, 1), "float32")
labels = (images[:, :4].mean((1, 2, 3)) > images[:, 4:].mean((1, 2, 3))).astype("int64")

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(4, 3, activation="relu"),
        layers.Flatten(),
        layers.Dropout(0.2),
        layers.Dense(2),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
trainer = model
history = trainer.fit(
    images[:150],
    labels[:150],
    batch_size=32,
    epochs=6,
    validation_data=(images[150:], labels[150:]),
    verbose=0,
    callbacks=[
        keras.callbacks.EarlyStopping("val_loss", patience=3, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, factor=0.5),
        keras.callbacks.ModelCheckpoint("best.keras", save_best_only=True),
        keras.callbacks.CSVLogger("log.csv"),
    ],
)
for name, values in history.history.items():
    print("metric", name, *(f"{value:.4f}" for value in values))
