"""A mixture has the proportions of its weights, and each source keeps its order and epochs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import Position, read
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
