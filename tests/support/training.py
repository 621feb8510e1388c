"""A small model, its data, and comparisons with plain Keras, for tests of the trainer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.support.case import compiled, mlp
from tests.support.data import points
from tfdist.checkpoint.settings import Checkpoints
from tfdist.strategies.mirrored_variables import copies_of
from tfdist.trainer import Trainer

TOLERANCE = 4e-5  # as in tests.conformance
ROWS = points()
X, Y = ROWS.x, ROWS.y

#: Deterministic `fit` arguments: batches of 7, 7 and 1 rows without shuffling.
FIT: dict[str, Any] = {"x": X, "y": Y, "batch_size": 7, "shuffle": False, "verbose": 0}

#: The same for four epochs with validation.
VALIDATED = FIT | {"validation_data": (X[:9], 1 - Y[:9]), "epochs": 4}

#: Every single-process strategy with its number of replicas.
STRATEGIES = [("one_device", 1), ("mirrored", 2), ("central_storage", 2), ("towers", 2)]


def build(
    optimizer: keras.optimizers.Optimizer | None = None, loss: Any = "mse", **options: Any
) -> keras.Model:
    """Returns a compiled network of two layers, identical on every call."""
    keras.utils.set_random_seed(1)
    return compiled(mlp(), optimizer, loss, **options)


def momentum() -> keras.Model:
    """Returns the same network with an optimizer that has state."""
    return build(keras.optimizers.SGD(0.1, momentum=0.9))


def building(
    make: Callable[[], keras.Model | Sequence[Any]],
    optimizer: Callable[[], keras.optimizers.Optimizer] | str | None = None,
    **options: Any,
) -> Callable[[], keras.Model]:
    """Returns a function that builds a compiled model.

    Args:
        make: Returns the model, or the layers of a sequential one.
        optimizer: Its name, or a function that creates it, because models cannot share one.
        **options: Further arguments of `compile`.
    """

    def build_model() -> keras.Model:
        keras.utils.set_random_seed(1)
        made = make()
        model = made if isinstance(made, keras.Model) else keras.Sequential(list(made))
        return compiled(model, optimizer() if callable(optimizer) else optimizer, **options)

    return build_model


def mirrored(build_model: Any = build, **options: Any) -> Trainer:
    """Returns a trainer with two replicas."""
    return Trainer(build_model, "mirrored", devices=2, **options)


def fresh_pair() -> tuple[Trainer, keras.Model]:
    """Returns `mirrored()` and `build()` in their initial states.

    Both are created once and reset on each call, so that tests share their traced functions.
    """
    trainer, plain, states = _create_pair()
    for model, values in zip((trainer.model, plain), states, strict=True):
        for variable, value in zip(_state(model), values, strict=True):
            variable.assign(value)
    return trainer, plain


@functools.cache
def _create_pair() -> tuple[Trainer, keras.Model, list[list[np.ndarray]]]:
    trainer, plain = mirrored(), build()
    states = [[v.numpy() for v in _state(model)] for model in (trainer.model, plain)]
    return trainer, plain, states


def _state(model: keras.Model) -> list[keras.Variable]:
    return model.variables + model.optimizer.variables


def dataset(batch_size: int = 7) -> tf.data.Dataset:
    """Returns the rows as a dataset of known length."""
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch_size)


@functools.cache
def reference(epochs: int = 2) -> keras.Model:
    """Returns the model trained by plain Keras on one device; `model.history` is its history."""
    model = build()
    model.fit(**FIT, epochs=epochs)
    return model


def assert_close(found: Any, wanted: Any) -> None:
    """Compares nested numbers within rounding."""
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
        np.testing.assert_allclose(found, wanted, TOLERANCE, TOLERANCE)


def assert_same_weights(model: keras.Model, other: keras.Model) -> None:
    """Asserts that every replica of `model` has the weights of `other`."""
    assert_close(replica_weights(model)[0], other.get_weights())
    for replica in replica_weights(model)[1:]:
        np.testing.assert_equal(replica, replica_weights(model)[0])


def assert_optimizers_match(model: keras.Model, other: keras.Model) -> None:
    """Asserts that the optimizers of two models have the same state."""
    assert_close(*([v.numpy() for v in m.optimizer.variables] for m in (model, other)))


def assert_trains_as_keras(trainer: Trainer, plain: keras.Model, **fit: Any) -> None:
    """Fits a trainer and a plain model, and asserts that histories and weights are the same."""
    assert_close(trainer.fit(**fit).history, plain.fit(**fit).history)
    assert_same_weights(trainer.model, plain)


def assert_resumes_from_another_strategy(
    build_model: Callable[[], keras.Model], strategy: Any, fit: dict[str, Any], folder: Path
) -> None:
    """Asserts that a strategy continues a run of one device, and one device continues its run."""

    def trained(strategy: Any, run: str, epochs: int) -> keras.Model:
        trainer = Trainer(build_model, strategy, checkpoints=Checkpoints(folder / run))
        trainer.fit(**fit, epochs=epochs)
        return trainer.model

    trained("one_device", "resumed", 1)
    trained(strategy, "resumed", 2)
    resumed, plain = trained("one_device", "resumed", 3), trained("one_device", "plain", 3)
    assert_close(resumed.get_weights(), plain.get_weights())
    assert_optimizers_match(resumed, plain)


def replica_weights(model: keras.Model) -> list[list[np.ndarray]]:
    """Returns the weights of a model for each replica that has variables of its own."""
    one_each = [[w.value, *copies_of(w.value).values()] for w in model.weights]
    return [[v.numpy() for v in replica] for replica in zip(*one_each, strict=True)]


def steps(model: keras.Model) -> int:
    """Returns the optimizer's step count."""
    return int(keras.ops.convert_to_numpy(model.optimizer.iterations))


@contextmanager
def computing_in(dtype: str) -> Iterator[None]:
    """Sets the dtype of Keras in a block, that of its variables included."""
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)
