"""What the tests of the trainer share: a small model, its rows, and comparing with plain Keras."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.support.case import compiled, mlp
from tests.support.data import points
from tfdist.strategies.mirrored_variables import copies_of
from tfdist.trainer import Trainer

BOUND = 4e-5  # as in tests.conformance
ROWS = points()
X, Y = ROWS.x, ROWS.y

#: `fit` arguments for which nothing is left to chance: batches of 7, 7 and 1 rows.
FIT: dict[str, Any] = {"x": X, "y": Y, "batch_size": 7, "shuffle": False, "verbose": 0}

#: The same with a validation after each of four epochs.
VALIDATED = FIT | {"validation_data": (X[:9], 1 - Y[:9]), "epochs": 4}

#: Every strategy of one process, with how many replicas.
STRATEGIES = [("one_device", 1), ("mirrored", 2), ("central_storage", 2), ("towers", 2)]


def build(
    optimizer: keras.optimizers.Optimizer | None = None, loss: Any = "mse", **options: Any
) -> keras.Model:
    """Returns a compiled network of two layers, the same one every time."""
    keras.utils.set_random_seed(1)
    return compiled(mlp(), optimizer, loss, **options)


def building(make_layers: Callable[[], Sequence[Any]], **options: Any) -> Callable[[], keras.Model]:
    """Returns a builder of a compiled sequential model."""

    def build_model() -> keras.Model:
        keras.utils.set_random_seed(1)
        return compiled(keras.Sequential(list(make_layers())), **options)

    return build_model


def mirrored(build_model: Any = build, **options: Any) -> Trainer:
    """Returns a trainer over two replicas."""
    return Trainer(build_model, "mirrored", devices=2, **options)


def afresh() -> tuple[Trainer, keras.Model]:
    """Returns `mirrored()` and `build()`, both as they are when they are made.

    They are the same two each time, set back: what was traced for one test serves the next.
    """
    trainer, plain, states = _made_once()
    for model, values in zip((trainer.model, plain), states, strict=True):
        for variable, value in zip(_state(model), values, strict=True):
            variable.assign(value)
    return trainer, plain


@functools.cache
def _made_once() -> tuple[Trainer, keras.Model, list[list[np.ndarray]]]:
    trainer, plain = mirrored(), build()
    states = [[v.numpy() for v in _state(model)] for model in (trainer.model, plain)]
    return trainer, plain, states


def _state(model: keras.Model) -> list[keras.Variable]:
    return model.variables + model.optimizer.variables


def dataset(batch_size: int = 7) -> tf.data.Dataset:
    """Returns the rows as a data set of known length."""
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch_size)


@functools.cache
def reference(epochs: int = 2) -> keras.Model:
    """Returns what plain Keras on one device trains; its history is the model's."""
    model = build()
    model.fit(**FIT, epochs=epochs)
    return model


def assert_close(found: Any, wanted: Any) -> None:
    """Compares nested numbers; rounding is all that may differ."""
    if isinstance(wanted, Mapping):
        assert list(found) == list(wanted)
        for name in wanted:
            assert_close(found[name], wanted[name])
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)
    elif wanted is None or isinstance(wanted, str):
        assert found == wanted
    else:
        assert np.shape(found) == np.shape(wanted)
        np.testing.assert_allclose(found, wanted, BOUND, BOUND)


def assert_same_weights(model: keras.Model, other: keras.Model) -> None:
    """Compares weights, in each copy of them."""
    assert_close(copies(model)[0], other.get_weights())
    for copy in copies(model)[1:]:
        np.testing.assert_equal(copy, copies(model)[0])


def copies(model: keras.Model) -> list[list[np.ndarray]]:
    """Returns the weights of a model once for each replica that has its own."""
    one_each = [[w.value, *copies_of(w.value).values()] for w in model.weights]
    return [[v.numpy() for v in copy] for copy in zip(*one_each, strict=True)]


def steps(model: keras.Model) -> int:
    """Returns how many steps the optimizer has counted."""
    return int(keras.ops.convert_to_numpy(model.optimizer.iterations))
