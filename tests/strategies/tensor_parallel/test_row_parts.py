"""Activations between split layers in parts of the rows: results, devices, bytes, fallbacks."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import keras
import numpy as np
import pytest
from keras import layers

from tests.support.training import assert_close, building
from tfdist.models import gpt
from tfdist.strategies.tensor_parallel.row_parts import RowParts, computes_by_rows
from tfdist.strategies.tensor_parallel.strategy import TensorParallel
from tfdist.trainer import Trainer

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((13, 5, 8)).astype("float32")
Y = RANDOM.integers(0, 3, (13,))
#: The last batch has one row, so that one device has none.
FIT: dict[str, Any] = {"x": X, "y": Y, "batch_size": 6, "shuffle": False, "verbose": 0}


def block() -> keras.Model:
    """Returns a transformer block between layers that read whole batches."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5, 8))
    hidden = layers.Dense(8)(inputs)
    normed = layers.LayerNormalization()(layers.Dropout(0.3, seed=2)(hidden))
    attended = layers.MultiHeadAttention(4, 2, dropout=0.2, seed=5)(normed, normed)
    hidden = hidden + layers.Dropout(0.3, seed=3)(attended)
    wide = layers.Dense(16, activation="gelu")(layers.LayerNormalization()(hidden))
    hidden = layers.Add()([hidden, layers.Dropout(0.3, seed=4)(layers.Dense(8)(wide))])
    hidden = layers.BatchNormalization()(hidden)
    outputs = layers.Dense(3, activation="softmax")(layers.Flatten()(hidden))
    model = keras.Model(inputs, outputs)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def rows(devices: int) -> TensorParallel:
    return TensorParallel(devices, smallest=1, split_activations="rows")


@pytest.mark.parametrize("devices", [2, pytest.param(3, marks=pytest.mark.long)])
def test_transformer_block_matches_one_device(devices: int) -> None:
    plain, trainer = block(), Trainer(block, rows(devices))
    wanted = plain.fit(**FIT, epochs=2).history
    spy = patch.object(
        RowParts, "reduce_scatter", autospec=True, side_effect=RowParts.reduce_scatter
    )
    with spy as reduce_scatter:
        assert_close(trainer.fit(**FIT, epochs=2).history, wanted)
    assert reduce_scatter.called
    assert_close(trainer.model.get_weights(), plain.get_weights())
    assert_close(trainer.predict(X, verbose=0), plain.predict(X, verbose=0))


@pytest.mark.parametrize(
    "split_activations", [pytest.param("none", marks=pytest.mark.long), "rows"]
)
def test_rematerialized_blocks_match_one_device(split_activations: str) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    build = building(partial(gpt, 11, 5, size="tiny", dropout=0.2, remat=True), loss=loss)

    tokens, weights = RANDOM.integers(0, 11, (3, 5)), []
    split = TensorParallel(2, smallest=1, split_activations=split_activations)
    for strategy in ("one_device", split):
        trainer = Trainer(build, strategy)
        trainer.fit(tokens, tokens, batch_size=3, verbose=0)
        weights.append(trainer.model.get_weights())
    assert_close(*weights)


class Positions(layers.Layer):
    """Returns a row of weights for every row of a batch."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.positions = self.add_weight(shape=(1, *shape[1:]))

    def call(self, x: Any) -> Any:
        return self.positions + 0.0


def with_positions() -> keras.Model:
    """Returns a model that adds a tensor of one row, in parts, to a batch in parts."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5, 8))
    hidden, positions = (
        layers.Dense(8)(layers.Dense(16, activation="gelu")(x))
        for x in (inputs, Positions()(inputs))
    )
    outputs = layers.Dense(1)(layers.Flatten()(hidden + positions))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    return model


def test_tensor_of_one_row_is_broadcast() -> None:
    plain, trainer = with_positions(), Trainer(with_positions, rows(2))
    fit = FIT | {"x": X[:9], "y": Y[:9, np.newaxis], "batch_size": 4}  # the last batch has one row
    assert_close(trainer.fit(**fit).history, plain.fit(**fit).history)
    assert_close(trainer.model.get_weights(), plain.get_weights())


def test_only_known_operations_compute_by_rows() -> None:
    assert computes_by_rows(layers.LayerNormalization())
    assert computes_by_rows(layers.Dropout(0.5))
    assert not computes_by_rows(layers.LayerNormalization(axis=-2))
    assert not computes_by_rows(layers.Dropout(0.5, noise_shape=(4, 1)))
    assert not computes_by_rows(layers.BatchNormalization())
    assert not computes_by_rows(layers.Activation(lambda x: x - x[:1]))
