"""Horovod's Keras example on MNIST; Horovod's own script differs in one import.

    mpirun -np 2 python tests/examples/horovod_mnist.py model.keras
    horovodrun -np 2 python tests/examples/horovod_mnist.py model.keras

Every rank draws batches of its own out of all images.
"""

from __future__ import annotations

import sys

import images
import keras
import tensorflow as tf

import tfdist.horovod as hvd

hvd.init()  # each rank on the GPU of its local rank

x, y = images.load()
dataset = tf.data.Dataset.from_tensor_slices((x, y)).repeat().shuffle(10_000).batch(64)

model = keras.Sequential(
    [
        keras.Input((28, 28, 1)),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Conv2D(64, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Dropout(0.25),
        keras.layers.Flatten(),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
learning_rate = 0.001 * hvd.size()
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(learning_rate))
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(learning_rate, warmup_epochs=1),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(sys.argv[1]))

history = model.fit(
    dataset, steps_per_epoch=28 // hvd.size(), epochs=3, callbacks=callbacks, verbose=0
)
print(f"rank {hvd.rank()} of {hvd.size()}: accuracy {history.history['accuracy'][-1]:.6f}")
