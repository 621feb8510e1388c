"""What the workers of a run settle among themselves, by sums over the replicas.

Everything goes through `Strategy.all_reduce`, so that it holds for every way of crossing
processes: what one worker says is a sum to which the others add zeros.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager.context import global_seed

from tfdist.errors import ConfigurationError
from tfdist.strategies.shares import Batch

if TYPE_CHECKING:
    from tfdist.strategies.base import Strategy

_PRIME = 2_147_483_647


def meet(strategy: Strategy) -> None:
    """Settles what all workers have to have alike before a model is made.

    A seed, unless the user set one: shuffles and initial weights are to be the same everywhere.

    Raises:
        ConfigurationError: The workers have different numbers of devices.
    """
    if strategy.num_workers == 1:
        return
    seeded = global_seed() is not None  # TensorFlow tells it nowhere else
    # Not of the generator that draws the initial weights: they are those of one worker.
    seed = random.SystemRandom().randrange(2**31)
    told = strategy.gather([len(strategy.devices), seeded, seed])
    counts = told[:, 0].astype(int)
    if counts.min() < counts.max():
        raise ConfigurationError(
            f"The workers have {', '.join(map(str, counts))} devices, by rank: "
            "expected as many on each; name them with devices."
        )
    if not told[:, 1].any():
        keras.utils.set_random_seed(int(told[0, 2]))


def gather(strategy: Strategy, mine: np.ndarray) -> np.ndarray:
    """Returns one row of numbers from each worker, in each of them.

    Args:
        strategy: Of several workers.
        mine: This worker's row, shape `(1, n)`, float64; `n` the same on every worker.
    """
    place = np.zeros((strategy.num_workers, 1))
    place[strategy.rank] = 1.0
    return np.asarray(_adder(strategy)(tf.constant(place * mine)))


def share(strategy: Strategy, text: str) -> str:
    """Returns the text of rank 0, in each worker; called outside of any graph."""
    data = text.encode()
    size = int(strategy.gather([len(data)])[0, 0])
    row = np.zeros(size)
    if strategy.rank == 0:
        row[:] = list(data)
    return bytes(strategy.gather(row.tolist())[0].astype(np.uint8)).decode()


@functools.cache
def _adder(strategy: Strategy) -> Callable[[tf.Tensor], tf.Tensor]:
    """Sums what the first replica of each worker brings; compiled once a strategy."""

    def add(table: tf.Tensor) -> tf.Tensor:
        results = strategy.run(
            lambda i: strategy.all_reduce([table if i == 0 else tf.zeros_like(table)])
        )
        return strategy.local_results(results)[0][0]

    return tf.function(add, reduce_retracing=True, autograph=False)


def total(strategy: Strategy, rows: tf.Tensor) -> tf.Tensor:
    """Sums a number over the workers, in a graph."""
    results = strategy.run(lambda i: strategy.all_reduce([rows if i == 0 else tf.zeros_like(rows)]))
    return strategy.local_results(results)[0][0]


def broadcast(strategy: Strategy, variables: Sequence[tf.Variable], root: int = 0) -> None:
    """Gives variables the values that they have on the rank `root`."""
    movable = [v for v in variables if v.dtype != tf.string]

    # An argument: a rank that knew its values to be zeros would have constants, and TensorFlow
    # computes a sum of constants ahead of time, some more than once, where the others wait.
    def everywhere(is_root: tf.Tensor) -> None:
        def on_replica(i: int) -> list[tf.Tensor]:
            counts = is_root if i == 0 else tf.zeros_like(is_root)
            values = [_movable(tf.convert_to_tensor(v)) for v in movable]
            return strategy.all_reduce([tf.where(counts, v, tf.zeros_like(v)) for v in values])

        def on_copy(values: list[tf.Tensor]) -> tf.Tensor:
            for variable, value in zip(movable, values, strict=True):
                variable.assign(tf.cast(value, variable.dtype))
            return tf.constant(0)

        strategy.update(on_copy, strategy.run(on_replica))

    tf.function(everywhere, autograph=False)(tf.constant(strategy.rank == root))


def _movable(tensor: tf.Tensor) -> tf.Tensor:
    """The value in a dtype that every way of summing has, and that holds it to the bit."""
    if tensor.dtype.is_floating:
        return tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor
    return tf.cast(tensor, tf.int64)


def checksum(batch: Batch) -> tf.Tensor:
    """Returns a number, int32 from 0, that tells batches of different rows apart.

    Made from the first and last row of each tensor: cheap, and rows shuffled otherwise change it.
    """
    result = tf.constant(0, tf.int64)
    for leaf in tf.nest.flatten(batch, expand_composites=True):
        if leaf is None:
            continue
        rows = tf.concat([leaf[:1], leaf[-1:]], 0) if leaf.shape.rank else leaf
        bits = tf.cast(_bits(tf.reshape(rows, [-1])), tf.int64)
        places = tf.range(1, tf.size(bits, tf.int64) + 1, dtype=tf.int64)
        result = mixed(result, tf.reduce_sum(tf.math.floormod(bits * places, _PRIME)))
    return result


def mixed(checksum: tf.Tensor, other: Any) -> tf.Tensor:
    """Returns the checksum of one thing after another, int64 from 0."""
    return tf.math.floormod(checksum * 31 + tf.cast(other, tf.int64), _PRIME)


def _bits(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype == tf.string:
        return tf.strings.to_hash_bucket_fast(tensor, _PRIME)
    if tensor.dtype.is_floating:
        return tf.bitcast(tf.cast(tensor, tf.float32), tf.int32)
    return tensor
