"""Reading and mapping on other machines, through a `tf.data` service that runs there.

What is sent is the graph of the dataset, so nothing in it may be Python; the shards must lie where
the workers see them under the same path. A dispatcher hands out blocks of records to whichever
worker is free: each comes once an epoch while no worker fails, in an order that depends on timing.
"""

from __future__ import annotations

import tensorflow as tf


def through(
    dataset: tf.data.Dataset, address: str, batch_size: int, *, drop_remainder: bool
) -> tf.data.Dataset:
    """Has a dataset made by a service, and its batches put together here.

    Args:
        dataset: of batches of up to `batch_size`; every worker ends with one that is not full.
        address: of the dispatcher, `grpc://HOST:PORT`.
        batch_size: rows of a batch.
        drop_remainder: leave out a last batch that is not full.
    """
    options = tf.data.Options()
    # Drawing at random is a state; a worker that starts anew may draw otherwise.
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    dataset = dataset.with_options(options)
    service = tf.data.experimental.service
    dataset = dataset.apply(service.distribute(service.ShardingPolicy.DYNAMIC, address))
    return dataset.rebatch(batch_size, drop_remainder)
