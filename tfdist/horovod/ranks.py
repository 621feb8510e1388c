"""Horovod's functions for ranks and collectives, for tensors of Keras 3."""

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
from tfdist.groups.horovod import check_host_name, installed
from tfdist.strategies.horovod import Horovod

_hvd = installed()

Average, Sum, Compression = _hvd.Average, _hvd.Sum, _hvd.Compression
rank, size = _hvd.rank, _hvd.size
local_rank, local_size = _hvd.local_rank, _hvd.local_size
shutdown = _hvd.shutdown


class Ranks(Horovod):
    """Processes that read their own data: each keeps its own seed to shuffle with."""

    def _agree(self) -> None:
        cluster.on_barrier(self.group.barrier)


@functools.cache
def strategy() -> Ranks:
    """Returns the strategy through which the ranks communicate; created on the first call."""
    return Ranks()


def init(*args: Any, **options: Any) -> None:
    """Starts Horovod, and gives this process the GPU of its rank on its host.

    Call it before the first TensorFlow operation.

    Example:
        >>> import tfdist.horovod as hvd
        >>> hvd.init()
        >>> hvd.rank(), hvd.size()
        (0, 1)

    Args:
        *args: Positional arguments of Horovod's `init`, such as process sets.
        **options: Keyword arguments of Horovod's `init`.
    """
    check_host_name()
    _hvd.init(*args, **options)
    strategy()


def is_version_greater_equal_than(version: str, target: str) -> bool:
    """Returns whether a version is the target version or later.

    Example:
        >>> import tfdist.horovod as hvd
        >>> hvd.is_version_greater_equal_than("2.21.0", "2.10")
        True
    """
    return Version(version) >= Version(target)


def forwarded(name: str) -> Any:
    """Returns an attribute of Horovod's TensorFlow module.

    Raises:
        AttributeError: The module has no such attribute.
    """
    return getattr(_hvd, name)


def allreduce(value: Any, name: str | None = None, op: Any = Average, **options: Any) -> tf.Tensor:
    """Returns the average or sum of a number or tensor over the ranks.

    Example:
        >>> import tfdist.horovod as hvd
        >>> hvd.init()
        >>> float(hvd.allreduce(2.5, op=hvd.Sum))  # on one rank
        2.5

    Args:
        value: A number or tensor of the same shape and dtype on every rank.
        name: Name of the operation.
        op: `Average` or `Sum`.
        **options: Further arguments of Horovod, such as `compression` and `prescale_factor`.
    """
    return _hvd.allreduce(tf.convert_to_tensor(value), name=name, op=op, **options)


def allgather(value: Any, name: str | None = None) -> tf.Tensor:
    """Returns the tensors of all ranks, concatenated along axis 0 in the order of the ranks.

    Example:
        >>> import tfdist.horovod as hvd
        >>> hvd.init()
        >>> hvd.allgather([[1, 2]]).numpy().tolist()  # on one rank
        [[1, 2]]
    """
    return _hvd.allgather(tf.convert_to_tensor(value), name=name)


def reducescatter(value: Any, name: str | None = None, op: Any = Average) -> tf.Tensor:
    """Returns this rank's shard, along axis 0, of the average or sum over the ranks.

    Example:
        >>> import tfdist.horovod as hvd
        >>> hvd.init()
        >>> hvd.reducescatter([1.0, 2.0]).numpy().tolist()  # on one rank
        [1.0, 2.0]
    """
    return _hvd.reducescatter(tf.convert_to_tensor(value), name=name, op=op)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """Returns the tensor of rank `root_rank` on every rank.

    Example:
        >>> import tfdist.horovod as hvd
        >>> hvd.init()
        >>> int(hvd.broadcast(7, root_rank=0))
        7
    """
    return _hvd.broadcast(tf.convert_to_tensor(value), root_rank, name=name)


def broadcast_global_variables(root_rank: int) -> None:
    """Raises an error, as Horovod does in eager mode, because there are no global variables.

    Example:
        >>> import tfdist.horovod as hvd
        >>> try:
        ...     hvd.broadcast_global_variables(0)
        ... except tfdist.errors.ConfigurationError as error:
        ...     print(str(error).partition(".")[0])
        TensorFlow 2 has no global variables

    Raises:
        ConfigurationError: Always.
    """
    raise ConfigurationError(
        "TensorFlow 2 has no global variables. Call broadcast_variables(model.variables, "
        f"root_rank={root_rank}), or pass BroadcastGlobalVariablesCallback({root_rank}) to fit."
    )


def broadcast_variables(variables: Sequence[keras.Variable | tf.Variable], root_rank: int) -> None:
    """Broadcasts variables from rank `root_rank`, including seeds, which Horovod cannot send.

    Example:
        >>> import tfdist.horovod as hvd
        >>> hvd.init()
        >>> hvd.broadcast_variables(build_model().variables, root_rank=0)
    """
    plain = [v.value if isinstance(v, keras.Variable) else v for v in variables]
    agreement.broadcast(strategy().group, plain, root_rank)
