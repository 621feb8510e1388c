"""Who computes, and how sums cross the replicas: one file a strategy.

This module imports no TensorFlow, so that a command line can list the names at once.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfdist.errors import ConfigurationError

if TYPE_CHECKING:
    from tfdist.strategies.base import Strategy as Strategy

#: The strategies by name: where each class is.
STRATEGIES: dict[str, str] = {
    "one_device": "tfdist.strategies.base:Strategy",
    "mirrored": "tfdist.strategies.mirrored:Mirrored",
    "central_storage": "tfdist.strategies.central_storage:CentralStorage",
    "towers": "tfdist.strategies.towers:Towers",
    "parameter_server": "tfdist.strategies.parameter_server.strategy:ParameterServer",
    "multi_worker": "tfdist.strategies.multi_worker.strategy:MultiWorker",
    "horovod": "tfdist.strategies.horovod:Horovod",
}

#: Those whose replicas may be in several processes that all run the script.
ACROSS_PROCESSES = ("multi_worker", "horovod")
#: Those whose numbers are one device's with one worker only.
ASYNCHRONOUS = ("parameter_server",)


def create(
    name: str | Strategy, devices: int | str | Sequence[str] | None = None, **options: Any
) -> Strategy:
    """Returns the strategy called `name`.

    Args:
        name: One of `STRATEGIES`. What is a strategy already is returned as it is.
        devices: As `tfdist.devices.resolve` takes them.
        **options: What the strategy's own class takes; an option that is None is left out.

    Raises:
        ConfigurationError: No strategy has that name, or it has no such option; or devices are
            given for what is a strategy already.
    """
    if not isinstance(name, str):
        return _made(name, devices)
    if name not in STRATEGIES:
        raise ConfigurationError(
            f"No strategy is called {name!r}; choose one of {', '.join(STRATEGIES)}."
        )
    module, cls = STRATEGIES[name].split(":")
    strategy = getattr(importlib.import_module(module), cls)
    given = {key: value for key, value in options.items() if value is not None}
    try:
        return strategy(devices, **given)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise ConfigurationError(
            f"strategy {name!r} takes no option {str(error).split(chr(39))[1]!r}: leave it out."
        ) from None


def _made(strategy: Strategy, devices: int | str | Sequence[str] | None) -> Strategy:
    """Returns what is a strategy already, if nothing contradicts it."""
    base = importlib.import_module("tfdist.strategies.base").Strategy
    if not isinstance(strategy, base):
        raise ConfigurationError(
            f"strategy={strategy!r}: expected a tfdist Strategy or one of the names "
            f"{', '.join(STRATEGIES)}."
        )
    if devices is not None:
        raise ConfigurationError("devices go to the strategy where it is an object.")
    return strategy


def __getattr__(attribute: str) -> Any:
    if attribute == "Strategy":
        return importlib.import_module("tfdist.strategies.base").Strategy
    raise AttributeError(f"module {__name__!r} has no attribute {attribute!r}")
