"""Trains with a gradient tape of Horovod."""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

hvd.init()
x = np.random.default_rng(1).random((96, 4)).astype("float32")
y = 2 * x.sum(1, keepdims=True)
model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="ones")])
optimizer, loss = tf.optimizers.SGD(0.1), tf.losses.MeanSquaredError()


@tf.function
def training_step(rows, targets, first_batch):
    with tf.GradientTape() as tape:
        value = loss(targets, model(rows, training=True))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(value, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)


batches = tf.data.Dataset.from_tensor_slices((x, y)).shard(hvd.size(), hvd.rank())
for number, (rows, targets) in enumerate(batches.batch(16 // hvd.size())):
    training_step(rows, targets, number == 0)
print("=", np.round(model.get_weights()[0].ravel(), 4).tolist())
