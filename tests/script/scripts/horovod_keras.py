"""Trains on the rows of each rank with Horovod's Keras API."""

import horovod.tensorflow.keras as hvd
import keras
import numpy as np
import tensorflow as tf

hvd.init()
for gpu in tf.config.experimental.list_physical_devices("GPU"):
    tf.config.experimental.set_memory_growth(gpu, True)
x = np.random.default_rng(1).random((96, 4)).astype("float32")
y = 2 * x.sum(1, keepdims=True)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
rows = slice(hvd.rank(), None, hvd.size())
model.fit(x[rows], y[rows], 16 // hvd.size(), 2, 0, [broadcast], shuffle=False)
print("=", np.round(model.get_weights()[0].ravel(), 4).tolist())
