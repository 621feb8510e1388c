"""Ranks and communication between them: Horovod's functions, for tensors of Keras 3."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from packaging.version import Version

from tfdist import cluster
from tfdist.errors import ConfigurationError
from tfdist.groups import agreement
from tfdist.groups.horovod import installed
from tfdist.strategies.horovod import Horovod

_hvd = installed()

Average, Sum, Compression = _hvd.Average, _hvd.Sum, _hvd.Compression
rank, size = _hvd.rank, _hvd.size
local_rank, local_size = _hvd.local_rank, _hvd.local_size
shutdown = _hvd.shutdown


class Ranks(Horovod):
    """Processes that feed themselves: each keeps its own seed, to shuffle in its own order."""

    def _agree(self) -> None:
        cluster.on_barrier(self.group.barrier)


@functools.cache
def strategy() -> Ranks:
    """Returns what everything here is exchanged through."""
    return Ranks()


def init(*args: Any, **options: Any) -> None:
    """Starts Horovod, and gives this process the GPU of its rank on its host.

    Call it before the first TensorFlow operation.

    Args:
        *args: Of Horovod's `init`, such as process sets.
        **options: Likewise.
    """
    _hvd.init(*args, **options)
    strategy()


def is_version_greater_equal_than(version: str, target: str) -> bool:
    """Returns whether a version of a package is another one or a later one."""
    return Version(version) >= Version(target)


def forwarded(name: str) -> Any:
    """Returns what Horovod's TensorFlow module has under a name.

    Raises:
        AttributeError: It has nothing.
    """
    return getattr(_hvd, name)


def allreduce(value: Any, name: str | None = None, op: Any = Average, **options: Any) -> tf.Tensor:
    """Returns the average, or the sum, of a number or tensor over the ranks.

    Args:
        value: As many numbers on every rank.
        name: Of the operation.
        op: `Average` or `Sum`.
        **options: Horovod's further ones, such as `compression` and `prescale_factor`.
    """
    return _hvd.allreduce(tf.convert_to_tensor(value), name=name, op=op, **options)


def allgather(value: Any, name: str | None = None) -> tf.Tensor:
    """Returns the tensors of all ranks, laid end to end along axis 0 by rank."""
    return _hvd.allgather(tf.convert_to_tensor(value), name=name)


def reducescatter(value: Any, name: str | None = None, op: Any = Average) -> tf.Tensor:
    """Returns this rank's part, along axis 0, of the average or sum over the ranks."""
    return _hvd.reducescatter(tf.convert_to_tensor(value), name=name, op=op)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """Returns the tensor of the rank `root_rank`."""
    return _hvd.broadcast(tf.convert_to_tensor(value), root_rank, name=name)


def broadcast_global_variables(root_rank: int) -> None:
    """Refuses, as Horovod does where TensorFlow is eager: there are no global variables.

    Raises:
        ConfigurationError: Always.
    """
    raise ConfigurationError(
        "TensorFlow 2 keeps no list of all variables: call broadcast_variables(model.variables, "
        f"root_rank={root_rank}), or pass BroadcastGlobalVariablesCallback({root_rank}) to fit."
    )


def broadcast_variables(variables: Sequence[keras.Variable | tf.Variable], root_rank: int) -> None:
    """Gives variables the values of the rank `root_rank`; seeds too, which Horovod cannot send."""
    plain = [v.value if isinstance(v, keras.Variable) else v for v in variables]
    agreement.broadcast(strategy().group, plain, root_rank)
