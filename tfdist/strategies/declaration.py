"""What is known of a strategy before TensorFlow is imported: where it is, and what it takes."""

from __future__ import annotations

import importlib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tfdist.errors import ConfigurationError


@dataclass(frozen=True)
class Option:
    """What the class of a strategy takes besides devices; the training command has a flag for it.

    Attributes:
        type: As in an annotation that pydantic checks: `int`, `str`, `Literal["a", "b"]`.
        help: What it is, for `--help`.
        default: What the class takes where the option is left out, for `--help`.
    """

    type: Any
    help: str
    default: Any

    def check(self, name: str, value: object) -> None:
        """Checks a value where there is only a choice of some.

        Raises:
            ConfigurationError: It is none of them.
        """
        is_choice = typing.get_origin(self.type) is typing.Literal
        if is_choice and value not in typing.get_args(self.type):
            choices = ", ".join(map(str, typing.get_args(self.type)))
            raise ConfigurationError(f"{name}={value!r}: expected one of {choices}.")


@dataclass(frozen=True)
class Declaration:
    """One line of the table of strategies.

    Attributes:
        path: Of the class, `"module:Class"`.
        options: What the class takes besides devices, by name.
        across_processes: Whether its replicas may be in several processes that all run the script.
        by_horovod: Whether Horovod joins these.
        least_devices: Of each process.
        asynchronous: Whether its numbers are those of one device with one worker only.
    """

    path: str
    options: Mapping[str, Option] = field(default_factory=dict)
    across_processes: bool = False
    by_horovod: bool = False
    least_devices: int = 1
    asynchronous: bool = False

    @property
    def joins_processes(self) -> bool:
        """Whether N processes make one training of it; of any other they make N."""
        return self.across_processes or self.asynchronous

    def load(self) -> Any:
        """Returns the class; this imports TensorFlow."""
        module, name = self.path.split(":")
        return getattr(importlib.import_module(module), name)

    def check(self, **values: object) -> None:
        """Checks values of options, of those that are a choice.

        Raises:
            ConfigurationError: A value that is none to choose.
        """
        for name, value in values.items():
            self.options[name].check(name, value)
