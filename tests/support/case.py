"""What a case is, and the helpers that every case is written with."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import keras

from tests.support.data import Data

Build = Callable[[], keras.Model]


@dataclasses.dataclass(frozen=True)
class Case:
    """A training run whose outcome is decided by its model and its global batches alone.

    Attributes:
        name: a slug, as in `pytest -k`.
        feature: what a user would call that which is tried, in one line.
        build: makes the compiled model, the same one every time.
        data: the rows to train on and to evaluate.
        batch_size: rows in a global batch.
        epochs: passes over the data.
        feed: how the rows are handed over, a key of `feeds.FEEDS`.
        fit: further arguments of `fit`.
        evaluate: further arguments of `evaluate`.
        accumulate: rounds in which tfdist's trainer works off a global batch.
        sync_batch_norm: whether tfdist's BatchNorm takes its statistics from the global batch.
        may_refuse: whether tfdist may decline the case by an error instead of answering it.
        is_random: whether it draws random numbers, which belong to places in a batch, not to rows.
        tolerance: how many times 4e-5 + 4e-5 |b| a number may be off.
        why: the reason for a tolerance above 1.
    """

    name: str
    feature: str
    build: Build
    data: Data
    batch_size: int = 7
    epochs: int = 2
    feed: str = "arrays"
    fit: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    evaluate: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    accumulate: int = 1
    sync_batch_norm: bool = False
    may_refuse: bool = False
    is_random: bool = False
    tolerance: float = 1.0
    why: str = ""


CASES: dict[str, Case] = {}


def case(data: Data, **options: Any) -> Callable[[Build], Build]:
    """Makes a case of a model builder: its name is the case's, its docstring the feature.

    Args:
        data: the rows to train on and to evaluate.
        **options: the other fields of `Case`.

    Raises:
        ValueError: two builders have one name, or a loose tolerance has no reason.
    """

    def register(build: Build) -> Build:
        name = build.__name__.replace("_", "-")
        if name in CASES:
            raise ValueError(f"Two cases are called {name}: rename one of them.")
        if options.get("tolerance", 1.0) > 1.0 and not options.get("why"):
            raise ValueError(f"{name} asks for a wider tolerance: say why.")
        feature = (inspect.getdoc(build) or name).splitlines()[0].rstrip(".")

        def seeded() -> keras.Model:
            keras.utils.set_random_seed(1)
            return build()

        CASES[name] = Case(name, feature, seeded, data, **options)
        return build

    return register


def compiled(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer | None = None,
    loss: Any = "mse",
    **options: Any,
) -> keras.Model:
    """Compiles a model, with plain gradient descent unless the case is about an optimizer.

    Gradient descent shows a gradient of the wrong size, which Adam and its like do not.
    """
    model.compile(optimizer=optimizer or keras.optimizers.SGD(0.1), loss=loss, **options)
    return model


def mlp(*, features: int = 4, outputs: int = 1, activation: str | None = None) -> keras.Model:
    """A network of two dense layers."""
    return keras.Sequential(
        [
            keras.Input((features,)),
            keras.layers.Dense(3, activation="tanh"),
            keras.layers.Dense(outputs, activation=activation),
        ]
    )


class Position(keras.layers.Layer):
    """Adds an embedding of the place in the sequence, as text and vision transformers do."""

    def build(self, shape: Any) -> None:
        """Makes the table, of one entry more than there are places."""
        self.table = keras.layers.Embedding(shape[-2] + 1, shape[-1])
        self.table.build()

    def call(self, inputs: Any) -> Any:
        """Maps [rows, places, numbers] to the same."""
        return inputs + self.table(keras.ops.arange(keras.ops.shape(inputs)[-2]))


def positioned() -> keras.Model:
    """A network of tokens [rows, 5] and their positions."""
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            keras.layers.Embedding(7, 2),
            Position(),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
