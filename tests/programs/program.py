"""What a program is, and the registry of them."""

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

#: In float64 rounding stays below 4e-9: a hundredth of what float32 hides would be seen.
TOLERANCE = 1e-4


def _none(_: Path) -> Sequence[keras.callbacks.Callback]:
    return ()


#: Trains by a model or a Trainer with the arguments of `fit`; may add numbers to the history.
Train = Callable[[Any, dict[str, Any]], keras.callbacks.History]


def _fit(runner: Any, arguments: dict[str, Any]) -> keras.callbacks.History:
    return runner.fit(**arguments)


@dataclasses.dataclass(frozen=True)
class Program(Case):
    """A case that is somebody's program.

    Attributes:
        family: what kind of program, as its file is called.
        floatx: what Keras computes with.
        callbacks: makes the callbacks of `fit`, given a folder for their files. What they find
            out they put into the logs, and so into the history.
        train: what the program does with a model or a Trainer.
        only_fit: whether the program neither evaluates nor predicts.
        quick: whether `make check` runs it; the others are left to `make conformance`.
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
    """Makes a program of a model builder: its name is the program's, its docstring the feature.

    Args:
        data: the rows to train on and to evaluate.
        **options: the other fields of `Program`.

    Raises:
        ValueError: two builders have one name, or a loose tolerance has no reason.
    """

    def register(build: Build) -> Build:
        family = build.__module__.rpartition(".")[2].replace("_", "-")
        name = f"{family}-{build.__name__.replace('_', '-')}"
        if name in PROGRAMS:
            raise ValueError(f"Two programs are called {name}: rename one of them.")
        exact = options.get("floatx", "float64") == "float64"
        chosen = {"tolerance": TOLERANCE if exact else 1.0} | options
        if chosen["tolerance"] > (TOLERANCE if exact else 1.0) and not options.get("why"):
            raise ValueError(f"{name} asks for a wider tolerance: say why.")
        feature = (inspect.getdoc(build) or name).splitlines()[0].rstrip(".")

        def seeded() -> keras.Model:
            keras.utils.set_random_seed(1)
            # Metrics and states are logged under names that Keras numbers through a process.
            global_state.set_global_attribute("object_name_uids", None)
            return build()

        PROGRAMS[name] = Program(name, feature, seeded, data, family=family, **chosen)
        return build

    return register
