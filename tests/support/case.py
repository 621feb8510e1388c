"""`Case`, the description of a conformance case, and the helpers that define cases."""

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
    """A training run that depends only on its model and its global batches.

    Attributes:
        name: Identifier, as in `pytest -k`.
        feature: The tested feature in one line, in a user's words.
        build: Returns the compiled model, identical on every call.
        data: Rows to train on and to evaluate.
        batch_size: Rows per global batch.
        epochs: Passes over the data.
        feed: How the data is passed, a key of `feeds.FEEDS`.
        fit: Further arguments of `fit`.
        evaluate: Further arguments of `evaluate`.
        accumulate: Accumulation rounds per global batch in tfdist's trainer.
        sync_batch_norm: Whether BatchNorm uses the statistics of the global batch in tfdist.
        may_refuse: Whether tfdist may refuse the case with an error.
        is_random: Whether it draws random numbers. These depend on a row's position in the batch.
        tolerance: Allowed error of a number b, in multiples of 4e-5 + 4e-5 |b|.
        why: Reason for a tolerance above 1.
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
    """Registers a model builder as a case, named like the function, with its docstring as feature.

    Raises:
        ValueError: If two builders have the same name, or a wide tolerance has no reason.
    """

    def register(build: Build) -> Build:
        name = build.__name__.replace("_", "-")
        if name in CASES:
            raise ValueError(f"Two cases are called {name}: rename one of them.")
        if options.get("tolerance", 1.0) > 1.0 and not options.get("why"):
            raise ValueError(f"{name} has a wide tolerance: set `why` to the reason.")
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
    """Compiles a model, with plain gradient descent unless the case tests an optimizer.

    Gradient descent reveals a gradient of the wrong scale, to which Adam-like optimizers are
    invariant.
    """
    model.compile(optimizer=optimizer or keras.optimizers.SGD(0.1), loss=loss, **options)
    return model


def mlp(*, features: int = 4, outputs: int = 1, activation: str | None = None) -> keras.Model:
    """Returns a network of two dense layers."""
    return keras.Sequential(
        [
            keras.Input((features,)),
            keras.layers.Dense(3, activation="tanh"),
            keras.layers.Dense(outputs, activation=activation),
        ]
    )


class Position(keras.layers.Layer):
    """Adds a position embedding, as text and vision transformers do."""

    def build(self, shape: Any) -> None:
        """Creates the embedding table, which has one entry more than there are positions."""
        self.table = keras.layers.Embedding(shape[-2] + 1, shape[-1])
        self.table.build()

    def call(self, inputs: Any) -> Any:
        return inputs + self.table(keras.ops.arange(keras.ops.shape(inputs)[-2]))


def positioned() -> keras.Model:
    """Returns a network of embedded tokens [rows, 5] and their positions."""
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            keras.layers.Embedding(7, 2),
            Position(),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
