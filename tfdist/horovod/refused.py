"""Arguments of Horovod's optimizer that are not supported, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from tfdist.errors import ConfigurationError
from tfdist.horovod.ranks import forwarded
from tfdist.upstream.patching import replace

_PACKED = "all gradients are all-reduced in one group"
_PLACED = "gradients are all-reduced on the device that computes them"
_LOCAL = (
    "all ranks share all weights, which is checked. Train the weights of one rank with another, "
    "undistributed optimizer, in a custom loop or in a keras MultiOptimizer, and exclude them with "
    "BroadcastGlobalVariablesCallback(local_variables=...)"
)
#: Horovod's arguments by name: the accepted values (the defaults), and why others are not.
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "name": ((None,), "the optimizer has a name: keras.optimizers.SGD(name=...)"),
    "device_dense": (("",), _PLACED),
    "device_sparse": (("",), _PLACED),
    "gradient_predivide_factor": (
        (1.0,),
        "gradients are divided by the number of ranks before the all-reduce",
    ),
    "num_groups": ((0,), _PACKED),
    "groups": ((None, 0), _PACKED),
    "process_set": (
        (None,),
        "gradients are summed over all ranks. To sum over fewer, call hvd.allreduce(..., "
        "process_set=...) in a custom loop, or start those ranks as a separate job",
    ),
    "scale_local_gradients": ((True,), _LOCAL),
}


def check(others: Mapping[str, Any]) -> None:
    """Checks Horovod's further arguments of `DistributedOptimizer`.

    Raises:
        ConfigurationError: An argument is not the default.
        TypeError: Horovod has no such argument.
    """
    for name, value in others.items():
        if name not in _UNSUPPORTED:
            raise TypeError(f"DistributedOptimizer() got an unexpected argument {name!r}.")
        plain, why = _UNSUPPORTED[name]
        if name == "process_set":
            plain = (*plain, forwarded("global_process_set"))
        if not any(value is default or value == default for default in plain):
            raise ConfigurationError(
                f"{name}={value!r} is not supported: {why}. Remove the argument."
            )


def without_local_variables(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes Horovod's method `register_local_var` of an optimizer raise a clear error."""
    replace(optimizer, "register_local_var", _no_local_variables)


def PartialDistributedOptimizer(*args: Any, **options: Any) -> None:  # noqa: N802 - Horovod's name
    """Raises an error: Horovod's optimizer for layers whose weights are local to each rank.

    Raises:
        ConfigurationError: Always.
    """
    raise ConfigurationError(
        f"PartialDistributedOptimizer is not supported: {_LOCAL}. Use DistributedOptimizer."
    )


def _no_local_variables(variable: Any) -> None:
    raise ConfigurationError(f"register_local_var is not supported: {_LOCAL}. Remove the call.")
