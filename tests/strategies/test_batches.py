"""Global batches are split into per-replica batches, with padding."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.support.training import assert_close, assert_trains_as_keras
from tfdist.strategies import batches
from tfdist.strategies.batches import drop_padding, num_rows, pad_to_one_row


@pytest.mark.parametrize("rows", [1, 2, 7, 9])
@pytest.mark.parametrize("num_shares", [1, 2, 3])
def test_per_replica_batches_contain_each_row_once_in_order(rows: int, num_shares: int) -> None:
    batch = ({"a": tf.range(rows), "b": None}, tf.reshape(tf.range(2 * rows), [rows, 2]))
    parts = batches.split(batch, num_shares, range(num_shares))
    assert len(parts) == num_shares
    own = [drop_padding(part.rows, part.num_rows) for part in parts]
    np.testing.assert_array_equal(np.concatenate([each[0]["a"] for each in own]), np.arange(rows))
    sizes = [len(each[1]) for each in own]
    assert sizes == [int(part.num_rows) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_empty_per_replica_batch_is_padded() -> None:
    first, second = batches.split(tf.constant([[7.0]]), 2, range(2))
    assert (int(first.num_rows), int(second.num_rows)) == (0, 1)
    np.testing.assert_array_equal(first.rows, [[7.0]])


RAGGED = tf.ragged.constant([[[1, 2]], [[3], []]], ragged_rank=2)


@pytest.mark.parametrize(
    "batch",
    [
        tf.ones((2, 3)),
        tf.constant(["a", "b"]),
        RAGGED,
        tf.sparse.from_dense(tf.ones((2, 3))),
        {"a": tf.ones((2,)), "b": None},
    ],
    ids=["dense", "strings", "ragged", "sparse", "nested"],
)
def test_only_empty_batches_are_padded(batch: Any) -> None:
    assert int(num_rows(pad_to_one_row(batch))) == 2
    nothing = batches.take(batch, tf.constant(0), tf.constant(0))
    filled = pad_to_one_row(nothing)
    assert int(num_rows(filled)) == 1
    assert int(num_rows(drop_padding(filled, tf.constant(0)))) == 0
    tf.nest.assert_same_structure(batch, filled)


_IMAGES = np.random.default_rng(1).integers(0, 256, (16, 9, 9, 3), np.uint8)


@pytest.mark.parametrize("check_data", ["full", "sampled"])
@pytest.mark.parametrize(
    "batch",
    [
        (tf.range(48.0), tf.range(16)),
        (tf.constant(_IMAGES), tf.range(16)),
        {"a": None, "b": tf.cast(tf.range(16), tf.bfloat16)},
        (tf.constant([*"abcdefghijklmnop"]),),
        (tf.sparse.from_dense(np.eye(16)),),
        (tf.ragged.range(tf.range(16)),),
    ],
    ids=["numbers", "images", "nested", "strings", "sparse", "ragged"],
)
def test_checksums_cover_the_middle_of_a_batch(batch: Any, check_data: batches.CheckData) -> None:
    order = [0, *range(14, 0, -1), 15]

    def reordered(leaf: Any) -> Any:
        if isinstance(leaf, tf.SparseTensor):
            return tf.sparse.from_dense(tf.gather(tf.sparse.to_dense(leaf), order))
        return None if leaf is None else tf.gather(leaf, order)

    other = tf.nest.map_structure(reordered, batch)
    assert batches.checksum(batch, check_data) == batches.checksum(batch, check_data)
    assert batches.checksum(batch, check_data) != batches.checksum(other, check_data)
    assert batches.checksum(batch, "off") == batches.checksum(other, "off")


def test_full_checksums_cover_every_element_and_samples_cover_all_labels() -> None:
    images, labels = tf.constant(_IMAGES), tf.range(16)
    full, sampled = (batches.checksum((images, labels), how) for how in ("full", "sampled"))
    for element in range(0, _IMAGES.size, 97):
        other = _IMAGES.copy()
        other.flat[element] ^= 1
        assert batches.checksum((tf.constant(other), labels), "full") != full
    for row in range(16):
        assert (
            batches.checksum((images, labels + tf.one_hot(row, 16, dtype=tf.int32)), "sampled")
            != sampled
        )


class NeedsRows(layers.Layer):
    """Fails on an empty batch, as convolutions do; adds a loss, a metric and a state."""

    def build(self, shape: Any) -> None:
        self.total = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.size = keras.metrics.Mean(name="size")

    def call(self, inputs: Any, training: bool = False) -> Any:
        with tf.control_dependencies([tf.debugging.assert_positive(tf.shape(inputs)[0])]):
            inputs = tf.identity(inputs)
        self.add_loss(keras.ops.sum(inputs**2))
        self.size.update_state(keras.ops.mean(inputs, -1))
        if training:
            self.total.assign(self.total + keras.ops.sum(inputs))
        return inputs


def needs_rows(y_true: Any, y_pred: Any) -> Any:
    """A custom loss or metric that fails on an empty batch."""
    with tf.control_dependencies([tf.debugging.assert_positive(tf.shape(y_true)[0])]):
        return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


def build(batch_norm: bool) -> keras.Model:
    keras.utils.set_random_seed(1)
    row = keras.Input((3,))
    word = keras.ops.cast(keras.ops.abs(row[:, 0]) * 3, "int32")
    hidden = NeedsRows()(layers.Dense(3)(row) + layers.Embedding(20, 3)(word))
    if batch_norm:
        hidden = layers.BatchNormalization()(hidden)
    model = keras.Model(row, layers.Dense(1)(hidden))
    # Accumulation makes the table's gradient dense, which changes Adam on one device, too.
    adam, sgd = keras.optimizers.Adam(0.01, epsilon=1e-2), keras.optimizers.SGD(0.01, momentum=0.9)
    model.compile(adam if batch_norm else sgd, needs_rows, metrics=["mae", needs_rows])
    return model


@pytest.mark.parametrize(("devices", "accumulate"), [(3, 1), (2, 2)])
def test_last_batch_of_one_row_matches_one_device(devices: int, accumulate: int) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(5, 3)).astype("float32")
    y = random.normal(size=(5, 1)).astype("float32")
    options: dict[str, Any] = {"batch_size": 4, "verbose": 0}  # the last batch has one row
    build_model = functools.partial(build, batch_norm=accumulate == 1)
    plain = build_model()
    trainer = tfdist.Trainer(
        build_model, "mirrored", devices, accumulate, sync_batch_norm=accumulate == 1
    )
    assert_trains_as_keras(trainer, plain, x=x, y=y, epochs=2, shuffle=False, **options)
    assert_close(trainer.evaluate(x, y, **options), plain.evaluate(x, y, **options))
    assert_close(trainer.predict(x, **options), plain.predict(x, **options))
