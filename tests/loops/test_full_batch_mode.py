"""Models in full-batch mode train, evaluate and predict as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.support.case import compiled
from tests.support.training import X, Y, assert_close, assert_same_weights, building, mirrored
from tfdist.errors import DataError, UnsupportedModelError


def stateful() -> keras.Model:
    """A recurrent state per row, which Keras does not list among the model's variables."""
    recurrent = layers.LSTM(3, stateful=True)
    return keras.Sequential([keras.Input((2, 2), batch_size=5), recurrent, layers.Dense(1)])


class Overwritten(layers.Layer):
    """Has a weight whose gradient is its new value, the mean of the batch."""

    def build(self, shape: Any) -> None:
        del shape
        self.mean = self.add_weight(shape=())
        self.mean.overwrite_with_gradient = True

    def call(self, inputs: Any) -> Any:
        @tf.custom_gradient
        def noted(inputs: Any, mean: Any) -> Any:
            return inputs + mean, lambda upstream: (upstream, tf.reduce_mean(inputs))

        return noted(inputs, tf.convert_to_tensor(self.mean))


def overwritten() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), layers.Dense(3), Overwritten(), layers.Dense(1)])


class Merged(keras.Model):
    """Sums over the atoms of each molecule."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = layers.Dense(3, activation="tanh"), layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        atoms, molecule = inputs
        return self.out(tf.math.segment_sum(self.hidden(atoms), molecule))


class Heated(keras.Model):
    """Divides by an input that is shared by all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.out = layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.out(inputs["rows"]) / inputs["temperature"]


def batches(x: Any, y: Any = Y) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(5)


def molecules() -> tf.data.Dataset:
    def merged(num_atoms: tf.Tensor, y: tf.Tensor) -> Any:
        molecule = tf.repeat(tf.range(tf.size(num_atoms)), num_atoms)
        atoms = tf.stack([molecule, tf.range(tf.size(molecule))], axis=1)
        return (tf.cast(atoms, tf.float32) / 9, molecule), y

    return batches(np.arange(len(Y)) % 3 + 1).map(merged)


def heated() -> tf.data.Dataset:
    return batches(X).map(lambda x, y: ({"rows": x, "temperature": tf.constant(2.0)}, y))


CASES: dict[str, tuple[Callable[[], keras.Model], Callable[[], Any], str]] = {
    "state per row": (stateful, lambda: batches(X.reshape(-1, 2, 2)), "keeps a state for each row"),
    "overwritten": (overwritten, lambda: batches(X), "is its new value, from the full batch"),
    "merged graphs": (Merged, molecules, "0/0 has 9, 0/1 has 9, 1 has 5"),
    "input without rows": (Heated, heated, ""),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_device(name: str, recwarn: pytest.WarningsRecorder) -> None:
    make, data, why = CASES[name]
    build = building(make, metrics=["mae"])
    plain, trainer = build(), mirrored(build)
    wanted = plain.fit(data(), epochs=2, verbose=0)
    assert_close(trainer.fit(data(), epochs=2, verbose=0).history, wanted.history)
    assert_same_weights(trainer.model, plain)
    assert_close(trainer.evaluate(data(), verbose=0), plain.evaluate(data(), verbose=0))
    assert_close(trainer.predict(data(), verbose=0), plain.predict(data(), verbose=0))
    warned = [m for m in (str(w.message) for w in recwarn) if "computes the full batch" in m]
    assert bool(warned) == bool(why)
    assert why in "".join(warned[:1])


def pairs() -> keras.Model:
    row = keras.Input((4,))
    return compiled(keras.Model(row, ops.matmul(row, ops.transpose(row)) + layers.Dense(1)(row)))


def test_accumulation_raises() -> None:
    trainer = mirrored(pairs, accumulate=2)
    with pytest.raises(UnsupportedModelError, match="mixes the rows of a batch"):
        trainer.fit(batches(X), verbose=0)


def test_batch_that_cannot_be_split_raises() -> None:
    def build() -> keras.Model:
        rows = keras.Input((4,)), keras.Input((4,))
        return compiled(keras.Model(rows, layers.Dense(1)(layers.Concatenate()(rows))))

    data = batches(X).map(lambda x, y: ((x, x[1:]), y))
    with pytest.raises(DataError, match="0/0 has 5, 0/1 has 4, 1 has 5, so it cannot be split"):
        mirrored(build).fit(data, verbose=0)
