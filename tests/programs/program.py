"""`Program`, the description of a program, and the registry of programs."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
from keras.src.backend.common import global_state

from tests.support.case import Build, Case
from tests.support.data import Data

#: In float64, rounding stays below 4e-9, so a hundredth of float32's rounding is detected.
TOLERANCE = 1e-4


def _none(_: Path) -> Sequence[keras.callbacks.Callback]:
    return ()


#: Trains a model or a Trainer with the arguments of `fit`; may add numbers to the history.
Train = Callable[[Any, dict[str, Any]], keras.callbacks.History]


def _fit(runner: Any, arguments: dict[str, Any]) -> keras.callbacks.History:
    return runner.fit(**arguments)


@dataclasses.dataclass(frozen=True)
class Program(Case):
    """A case that is a whole program.

    Attributes:
        family: Kind of program: the name of its file.
        floatx: Default dtype of Keras.
        callbacks: Creates the callbacks of `fit`, given a folder for their files. They add their
            results to the logs, and so to the history.
        train: What the program does with a model or a Trainer.
        only_fit: Whether the program neither evaluates nor predicts.
        quick: Whether `make check` runs it; `make conformance` runs all.
    """

    batch_size: int = 5
    tolerance: float = TOLERANCE
    family: str = ""
    floatx: str = "float64"
    callbacks: Callable[[Path], Sequence[keras.callbacks.Callback]] = _none
    train: Train = _fit
    only_fit: bool = False
    quick: bool = False


PROGRAMS: dict[str, Program] = {}


def program(data: Data, **options: Any) -> Callable[[Build], Build]:
    """Registers a model builder as a program, named like the function, with its docstring.

    Raises:
        ValueError: If two builders have the same name, or a wide tolerance has no reason.
    """

    def register(build: Build) -> Build:
        family = build.__module__.rpartition(".")[2].replace("_", "-")
        name = f"{family}-{build.__name__.replace('_', '-')}"
        if name in PROGRAMS:
            raise ValueError(f"Two programs are called {name}: rename one of them.")
        exact = options.get("floatx", "float64") == "float64"
        chosen = {"tolerance": TOLERANCE if exact else 1.0} | options
        if chosen["tolerance"] > (TOLERANCE if exact else 1.0) and not options.get("why"):
            raise ValueError(f"{name} has a wide tolerance: set `why` to the reason.")
        feature = (inspect.getdoc(build) or name).splitlines()[0].rstrip(".")
        PROGRAMS[name] = Program(name, feature, _seeded(build), data, family=family, **chosen)
        return build

    return register


def unregistered(build: Build, data: Data, **options: Any) -> Program:
    """Returns a program that only calls `fit`, and is not in `PROGRAMS`."""
    return Program("unregistered", "", _seeded(build), data, only_fit=True, **options)


def _seeded(build: Build) -> Build:
    """Returns a function that builds the same model at each call."""

    def seeded() -> keras.Model:
        keras.utils.set_random_seed(1)
        # Keras numbers the names of metrics and states throughout a process.
        global_state.set_global_attribute("object_name_uids", None)
        return build()

    return seeded
