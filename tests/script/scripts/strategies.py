"""Uses strategies of `tf.distribute` as TensorFlow's tutorials do."""

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(3)
strategy = tf.distribute.MirroredStrategy()
assert isinstance(strategy, tf.distribute.Strategy)
x = np.random.rand(101, 4).astype("float32")
y = x.sum(1, keepdims=True)
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(8, "relu"), tf.keras.layers.Dense(1)])
    model.compile(tf.keras.optimizers.SGD(0.1, clipnorm=0.5), "mse", metrics=["mae"])
batches = tf.data.Dataset.from_tensor_slices((x, y)).cache().shuffle(101, seed=1).batch(32)
history = model.fit(strategy.experimental_distribute_dataset(batches), epochs=2, verbose=0)
print("=", *(np.round(values, 5).tolist() for values in history.history.values()))


def rows_of_worker(context):
    """Returns batches for one replica each."""
    size = context.get_per_replica_batch_size(24)
    rows = tf.data.Dataset.from_tensor_slices((x[:96], y[:96])).batch(size)
    return rows.shard(context.num_input_pipelines, context.input_pipeline_id)


distributed = strategy.distribute_datasets_from_function(rows_of_worker)
history = model.fit(distributed, epochs=2, steps_per_epoch=4, verbose=0)
print("=", *(np.round(values, 4).tolist() for values in history.history.values()))
print("replicas", strategy.num_replicas_in_sync, tf.distribute.get_strategy().num_replicas_in_sync)
print("task", strategy.cluster_resolver.task_id if strategy.cluster_resolver else None)
with tf.distribute.OneDeviceStrategy("/cpu:0").scope() as one:
    print("one", one.num_replicas_in_sync)
