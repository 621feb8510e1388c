"""Declarations of strategies and their options, available before TensorFlow is imported."""

from __future__ import annotations

import importlib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tfdist.errors import ConfigurationError


@dataclass(frozen=True)
class Option:
    """An argument of a strategy's class, for which the training command has a flag.

    Attributes:
        type: An annotation that pydantic can check: `int`, `str`, `Literal["a", "b"]`.
        help: The description in `--help`.
        default: The value if the option is left out, for `--help`.
    """

    type: Any
    help: str
    default: Any

    @property
    def choices(self) -> tuple[str, ...]:
        """The fixed set of values; empty if there is none."""
        return typing.get_args(self.type) if typing.get_origin(self.type) is typing.Literal else ()

    def check(self, name: str, value: object) -> None:
        """Checks a value against the choices, if the option has a fixed set of them.

        Raises:
            ConfigurationError: The value is not one of the choices.
        """
        if self.choices and value not in self.choices:
            raise ConfigurationError(
                f"{name}={value!r}: expected one of {', '.join(self.choices)}."
            )


@dataclass(frozen=True)
class Declaration:
    """A line of the table of strategies.

    Attributes:
        path: The class, as `"module:Class"`.
        options: Arguments of the class besides devices, by name.
        across_processes: Whether several processes that all run the script can train together.
        by_horovod: Whether they exchange sums through Horovod.
        min_devices: The smallest number of devices of a process.
        asynchronous: Whether it matches one device only if there is a single worker.
    """

    path: str
    options: Mapping[str, Option] = field(default_factory=dict)
    across_processes: bool = False
    by_horovod: bool = False
    min_devices: int = 1
    asynchronous: bool = False

    @property
    def supports_processes(self) -> bool:
        """Whether N processes train one model together, instead of one model each."""
        return self.across_processes or self.asynchronous

    def load(self) -> Any:
        """Imports and returns the class, and TensorFlow with it."""
        module, name = self.path.split(":")
        return getattr(importlib.import_module(module), name)

    def check(self, **values: object) -> None:
        """Checks values of options that have a fixed set of choices.

        Raises:
            ConfigurationError: A value is not one of the choices.
        """
        for name, value in values.items():
            self.options[name].check(name, value)
