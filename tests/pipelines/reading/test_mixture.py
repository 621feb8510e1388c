"""Mixtures of data sets, and examples that are mixed with each other."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import pipelines
from pipelines import Position, read
from pipelines.maps.layers import mixed
from pipelines.reading.mixture import Source, mix
from tests.support import numbers

Taken = list[tuple[int, int]]


def tagged(source: int) -> Any:
    return lambda example: {"source": source, "number": example["number"]}


def taken(dataset: tf.data.Dataset) -> list[Taken]:
    return [
        list(zip(batch["source"].tolist(), batch["number"].tolist(), strict=True))
        for batch in dataset.as_numpy_iterator()
    ]


@settings(deadline=None, max_examples=3)
@given(
    sizes=st.lists(st.integers(6, 30), min_size=1, max_size=3),
    batch_size=st.integers(1, 6),
    shuffle_buffer=st.sampled_from([0, 5]),
    data=st.data(),
)
def test_sources_keep_their_order_and_resume(
    sizes: list[int], batch_size: int, shuffle_buffer: int, data: st.DataObject
) -> None:
    mixing: dict[str, Any] = {"num_batches": 6, "seed": 3, "shuffle_buffer": shuffle_buffer}
    with tempfile.TemporaryDirectory() as directory:
        sources = []
        for i, size in enumerate(sizes):
            numbers.write(Path(directory, str(i)), size, 2)
            sources.append(Source(Path(directory, str(i)), i + 1, tagged(i)))
        dataset = mix(sources, batch_size, **mixing)
        assert dataset.cardinality() == 6
        epochs = [taken(dataset) for _ in range(2)]
        every = [example for epoch in epochs for batch in epoch for example in batch]
        for i, source in enumerate(sources):
            own = [number for which, number in every if which == i]
            alone = read(source.directory, 4, seed=3, shuffle_buffer=shuffle_buffer)
            expected: list[int] = []
            while len(expected) < len(own):
                expected += numbers.order(alone)
            assert own == expected[: len(own)]
        batch = data.draw(st.integers(0, 6))
        begun = mix(sources, batch_size, start=Position(1, batch), **mixing)
        assert taken(begun) == epochs[1][batch:]


def test_proportions_are_exact_and_resume(tmp_path: Path) -> None:
    for i in range(3):
        numbers.write(tmp_path / str(i), 30, 1)
    sources = [Source(tmp_path / str(i), weight, tagged(i)) for i, weight in enumerate([1, 2, 7])]
    mixture = mix(sources, 100, num_batches=20, seed=1)
    batches = taken(mixture)
    every = [source for batch in batches for source, _ in batch]
    assert [every.count(i) for i in range(3)] == [200, 400, 1400]
    assert len({*every[:20]}) > 1  # not one after the other
    assert mixture.cardinality() == 20
    resumed = mix(sources, 100, num_batches=20, seed=1, start=Position(0, 5))
    assert taken(resumed) == batches[5:]
    assert resumed.cardinality() == tf.data.UNKNOWN_CARDINALITY


@pytest.mark.parametrize("weights", [[], [1, 0], [1, float("nan")], [1, 1e-9]])
def test_invalid_weights_are_rejected(tmp_path: Path, weights: list[float]) -> None:
    numbers.write(tmp_path, 30, 1)
    with pytest.raises(ValueError, match="sources: expected"):
        mix([Source(tmp_path, weight) for weight in weights], 4, num_batches=1, seed=0)


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
