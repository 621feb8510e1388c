"""Arguments of Horovod's optimizer that this one refuses, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from tfdist.errors import ConfigurationError
from tfdist.horovod.ranks import forwarded
from tfdist.upstream.patching import replace

_PACKED = "all gradients are all-reduced in one group"
_PLACED = "gradients are all-reduced on their own device"
_LOCAL = (
    "every weight here is one of all ranks, and is checked to be so: train weights of a rank's own "
    "by an optimizer that was not given to DistributedOptimizer, in a custom loop, or both in "
    " a keras MultiOptimizer; BroadcastGlobalVariablesCallback(local_variables=...) leaves "
    "them as they are"
)
#: Horovod's arguments by name: what they are by themselves, and why nothing else is taken.
_OTHERS: dict[str, tuple[tuple[Any, ...], str]] = {
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
        "gradients are summed over all ranks: sum over fewer by hvd.allreduce(..., "
        "process_set=...) in a custom loop, or start those ranks as a separate job",
    ),
    "scale_local_gradients": ((True,), _LOCAL),
}


def check(others: Mapping[str, Any]) -> None:
    """Checks Horovod's further arguments of `DistributedOptimizer`.

    Raises:
        ConfigurationError: One of them asks for something.
        TypeError: Horovod has no such argument.
    """
    for name, value in others.items():
        if name not in _OTHERS:
            raise TypeError(f"DistributedOptimizer() got an unexpected argument {name!r}.")
        plain, why = _OTHERS[name]
        if name == "process_set":
            plain = (*plain, forwarded("global_process_set"))
        if not any(value is one or value == one for one in plain):
            raise ConfigurationError(f"{name}={value!r}: leave it out; {why}.")


def without_local_variables(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes an optimizer's `register_local_var`, a method of Horovod's, raise a clear error."""
    replace(optimizer, "register_local_var", _no_local_variables)


def PartialDistributedOptimizer(*args: Any, **options: Any) -> None:  # noqa: N802 - Horovod's name
    """Horovod's optimizer that leaves some layers' weights to each rank.

    Raises:
        ConfigurationError: Always.
    """
    raise ConfigurationError(f"PartialDistributedOptimizer: use DistributedOptimizer; {_LOCAL}.")


def _no_local_variables(variable: Any) -> None:
    raise ConfigurationError(f"register_local_var: leave it out; {_LOCAL}.")
