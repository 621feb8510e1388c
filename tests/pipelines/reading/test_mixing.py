"""Random changes of whole batches depend on seed, epoch and record only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import pipelines
from pipelines.maps.layers import mixed
from tests.support import numbers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    numbers.write(tmp_path, num_records=20, num_shards=2)
    return tmp_path


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"map_fn": lambda example: example | {"mapped": example["number"] + 1}},
        {"cache": "memory"},
    ],
    ids=["decoded", "mapped", "cached"],
)
def test_seed_follows_from_epoch_and_record(folder: Path, options: dict[str, Any]) -> None:
    def epochs() -> list[list[tuple[list[int], list[int]]]]:
        dataset = pipelines.read(
            folder, 8, shuffle_buffer=20, seed=3, **options,
            batch_fn=lambda batch: batch["number"], mix_fn=lambda batch, seed: (batch, seed),
        )  # fmt: skip
        assert dataset.cardinality() == 3
        return [[(n.tolist(), s.tolist()) for n, s in dataset.as_numpy_iterator()] for _ in "ab"]

    first = epochs()
    tf.random.set_seed(0)  # the program's own
    assert epochs() == first
    batches = [batch for epoch in first for batch in epoch]
    assert [len(rows) for rows, _ in batches] == [8, 8, 4] * 2
    assert sorted(row for rows, _ in batches[:3] for row in rows) == list(range(20))
    assert len({tuple(seed) for _, seed in batches}) == len(batches)


def test_pairs_are_mixed_as_by_the_layer(folder: Path) -> None:
    def pair(batch: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        ink = tf.cast(batch["number"], tf.float32)[:, None, None, None]
        return tf.ones((1, 2, 2, 1)) * ink, tf.one_hot(batch["number"], 20)

    data = pipelines.read(folder, 10, batch_fn=pair, mix_fn=mixed(keras.layers.MixUp(0.4)))
    for images, labels in data.as_numpy_iterator():
        # An image is its number's worth of ink, and so is what two of them are mixed to.
        np.testing.assert_allclose(labels @ np.arange(20), images[:, 0, 0, 0], rtol=1e-4)
        assert (labels.max(-1) < 1).any()


@pytest.mark.parametrize(
    "options",
    [
        {"last_batch": "pad"},
        {"data_service": "grpc://here:1"},
        {"context": tf.distribute.InputContext(2, 0, 2)},
    ],
)
def test_only_whole_global_batches_are_mixed(folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="mix_fn: needs whole global batches"):
        pipelines.read(folder, 8, mix_fn=lambda batch, seed: batch, **options)
