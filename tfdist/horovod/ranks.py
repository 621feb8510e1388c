"""The ranks, and what crosses them: Horovod's own functions, for what Keras 3 hands over."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import cluster
from tfdist.strategies.collectives import host_values
from tfdist.strategies.horovod import Horovod, installed

_hvd = installed()

Average, Sum, Compression = _hvd.Average, _hvd.Sum, _hvd.Compression
rank, size = _hvd.rank, _hvd.size
local_rank, local_size = _hvd.local_rank, _hvd.local_size
shutdown = _hvd.shutdown


class Ranks(Horovod):
    """Processes that feed themselves: each keeps its own seed, to shuffle in its own order."""

    def start(self) -> None:
        cluster.on_barrier(self.barrier)


@functools.cache
def strategy() -> Ranks:
    """Returns what everything here is exchanged through."""
    return Ranks()


def init() -> None:
    """Starts Horovod, and gives this process the GPU of its rank on its host.

    Call it before the first TensorFlow operation.
    """
    _hvd.init()
    strategy()


def allreduce(value: Any, op: Any = Average, compression: Any = Compression.none) -> tf.Tensor:
    """Returns the average, or the sum, of a number or tensor over the ranks."""
    return _hvd.allreduce(tf.convert_to_tensor(value), op=op, compression=compression)


def allgather(value: Any) -> tf.Tensor:
    """Returns the tensors of all ranks, laid end to end along axis 0 by rank."""
    return _hvd.allgather(tf.convert_to_tensor(value))


def broadcast(value: Any, root_rank: int) -> tf.Tensor:
    """Returns the tensor of the rank `root_rank`."""
    return _hvd.broadcast(tf.convert_to_tensor(value), root_rank)


def broadcast_variables(variables: Sequence[keras.Variable | tf.Variable], root_rank: int) -> None:
    """Gives variables the values of the rank `root_rank`; seeds too, which Horovod cannot send."""
    plain = [v.value if isinstance(v, keras.Variable) else v for v in variables]
    host_values.broadcast(strategy(), plain, root_rank)
