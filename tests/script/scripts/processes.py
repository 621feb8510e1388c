"""Sets no seed, and saves and loads files, as a script for one process does."""

import random

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

x, y = load_digits(return_X_y=True)
x_train, x_test, y_train, y_test = train_test_split(x / 16, y, train_size=300)
print("= data", list({"ape", "bat", "cat"}), x_test[0, :6].sum(), random.random())
model = keras.Sequential(
    [keras.layers.Dense(32, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(10)]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
saver = keras.callbacks.ModelCheckpoint("best.weights.h5", save_weights_only=True)
history = model.fit(x_train, y_train, 50, 2, 0, [saver], validation_data=(x_test, y_test))
print("= fit", *(np.round(values, 4).tolist() for values in history.history.values()))
model.load_weights("best.weights.h5")
model.save("model.keras")
loaded = keras.models.load_model("model.keras")
print("= loaded", np.round(loaded.predict(x_test[:2], verbose=0), 3).tolist())
print("= batch", np.round(loaded.train_on_batch(x_test[:30], y_test[:30]), 4).tolist())
