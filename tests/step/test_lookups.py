"""The first batch tells whether all rows look up the same entries of an embedding table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.support.case import compiled
from tests.support.data import tokens
from tfdist.errors import UnsupportedModelError
from tfdist.step.lookups import Lookups

DATA = tokens()

#: Maps tokens [rows, 5] to the entries that are looked up in a table of 8.
Indices = Callable[[Any], Any]


class Table(layers.Layer):
    """Returns the mean of the looked-up entries of each row."""

    def __init__(self, *indices: Indices) -> None:
        super().__init__()
        self.indices, self.table = indices, layers.Embedding(8, 2)

    def build(self, shape: Any) -> None:
        self.table.build()

    def call(self, inputs: Any) -> Any:
        looked_up = [ops.mean(self.table(indices(inputs)), axis=-2) for indices in self.indices]
        return ops.cast(inputs, "float32") + ops.sum(sum(looked_up), axis=-1, keepdims=True)


def lookups(*indices: Indices, rows: int = 8) -> Lookups:
    inputs = keras.Input((5,), dtype="int32")
    model = compiled(keras.Model(inputs, layers.Dense(1)(Table(*indices)(inputs))))
    return Lookups(model, lambda: (tf.constant(DATA.x[:rows]), tf.constant(DATA.y[:rows])))


def positions(tokens: Any) -> Any:
    return ops.arange(ops.shape(tokens)[1])


def pairs(tokens: Any) -> Any:
    """Returns entries by the distance of two positions, with repetitions."""
    return ops.reshape(ops.abs(positions(tokens)[:, None] - positions(tokens)), [-1])


def identity(tokens: Any) -> Any:
    return tokens


def row_number(tokens: Any) -> Any:
    """Returns another entry for each row, restarting on every replica."""
    return ops.cumsum(ops.ones_like(tokens[:, :1]), axis=0) - 1


@pytest.mark.parametrize(
    ("indices", "alike"),
    [
        ([positions], True),
        ([pairs, positions], True),
        ([identity], False),
        ([identity, lambda tokens: tokens[:, ::-1]], False),
        ([lambda tokens: ops.broadcast_to(positions(tokens), ops.shape(tokens))], False),
        ([row_number], False),
    ],
)
def test_classifies_lookups(indices: list[Indices], alike: bool) -> None:
    assert lookups(*indices).are_alike(0) == alike


@pytest.mark.parametrize(
    "indices", [[identity, positions], [lambda tokens: ops.max(tokens, axis=0)]]
)
def test_mixed_lookups_raise(indices: list[Indices]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"lookups .*embeddings' depend on the rows"):
        lookups(*indices).are_alike(0)


def test_batch_of_one_row_raises() -> None:
    with pytest.raises(UnsupportedModelError, match="batch of at least 2 rows"):
        lookups(identity, rows=1).are_alike(0)
