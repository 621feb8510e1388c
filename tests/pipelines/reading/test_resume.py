"""A dataset that starts at a position yields exactly the remaining batches."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import pipelines
from pipelines import Position
from tests.support import numbers

quick = settings(deadline=None, max_examples=5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    numbers.write(tmp_path, num_records=100, num_shards=4)
    return tmp_path


def batches(dataset: tf.data.Dataset) -> list[list[int]]:
    return [batch["number"].tolist() for batch in dataset.as_numpy_iterator()]


@quick
@given(data=st.data())
def test_rest_of_an_epoch_is_the_same(data: st.DataObject) -> None:
    num_records, workers = data.draw(st.integers(4, 60)), data.draw(st.integers(1, 3))
    reading: dict[str, Any] = {
        "batch_size": workers * data.draw(st.integers(1, 9)),
        "shuffle_buffer": data.draw(st.sampled_from([0, 3, 20, 100])),
        "last_batch": data.draw(st.sampled_from(["keep", "drop"])),
        "seed": 7,
        "context": tf.distribute.InputContext(workers, workers - 1, workers),
    }
    with tempfile.TemporaryDirectory() as directory:
        numbers.write(Path(directory), num_records, data.draw(st.integers(1, 6)))
        whole = pipelines.read(directory, **reading)
        epochs = [batches(whole) for _ in range(3)]
        taken = data.draw(st.integers(0, len(epochs[1])))
        begun = pipelines.read(directory, start=Position(1, taken), **reading)
        assert batches(begun) == epochs[1][taken:]
        assert batches(begun) == epochs[2]


def test_order_does_not_depend_on_the_number_of_threads(folder: Path) -> None:
    tunings = [
        pipelines.Tuning(num_reads=1, num_maps=1, num_prefetched=1, num_threads=1),
        pipelines.Tuning(num_reads=8, num_maps=8, num_prefetched=8, num_threads=8),
    ]
    orders = [
        numbers.order(
            pipelines.read(
                folder, 10, shuffle_buffer=30, seed=1, tuning=tuning, map_fn=lambda example: example
            )
        )
        for tuning in tunings
    ]
    assert orders[0] == orders[1]


def test_start_can_be_a_function(folder: Path) -> None:
    """A function that determines the start does not depend on earlier iterations."""
    position = Position(0, 2)
    reading: dict[str, Any] = {"batch_size": 10, "shuffle_buffer": 30, "seed": 1}
    dataset = pipelines.read(folder, start=lambda: position, **reading)
    whole = pipelines.read(folder, **reading)
    epochs = [batches(whole) for _ in range(4)]
    for position in [Position(0, 2), Position(0, 2), Position(3, 9), Position(1, 0)]:
        assert batches(dataset) == epochs[position.epoch][position.batch :]
    assert dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY


def test_finished_shards_are_not_read_again(folder: Path) -> None:
    """The first two shards are gone; only data after them is read."""
    dataset = pipelines.read(folder, 10, start=Position(0, 5))
    for shard in sorted(folder.glob("*.tfrecord"))[:2]:
        shard.unlink()
    assert len(batches(dataset)) == 5


def test_examples_have_the_same_seeds_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seeded(example: dict[str, tf.Tensor], seed: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"number": example["number"], "seed": seed}

    def seeds(context: tf.distribute.InputContext | None, **reading: Any) -> list[dict]:
        dataset = pipelines.read(folder, 10, seed=1, augment_fn=seeded, context=context, **reading)
        return [
            {
                int(number): tuple(seed)
                for batch in dataset.as_numpy_iterator()
                for number, seed in zip(batch["number"], batch["seed"], strict=True)
            }
            for _ in range(2)
        ]

    first, second = seeds(None, shuffle_buffer=30)
    halves = [seeds(tf.distribute.InputContext(2, i, 2)) for i in range(2)]
    assert halves[0][0] | halves[1][0] == first
    assert halves[0][1] | halves[1][1] == second
    monkeypatch.chdir(tmp_path)
    for place in ("memory", "cache"):
        assert seeds(None, cache=place) == [first, second]
        assert Path(place).exists() == (place == "cache")
    assert len({*first.values(), *second.values()}) == 200


@pytest.mark.parametrize("reading", [{}, {"seed": 1, "deterministic": False}])
def test_start_requires_a_reproducible_order(folder: Path, reading: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="start: requires a reproducible order"):
        pipelines.read(folder, 10, shuffle_buffer=30, start=Position(1), **reading)


@quick
@given(num_records=st.integers(1, 40), batch_size=st.integers(1, 9), map_first=st.booleans())
def test_padding_keeps_every_record_once(
    num_records: int, batch_size: int, map_first: bool
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        numbers.write(Path(directory), num_records, 2)
        dataset = pipelines.read(
            directory,
            batch_size,
            last_batch="pad",
            map_fn=(lambda example: example) if map_first else None,
        )
        assert dataset.element_spec[0]["array"].shape == (batch_size, 2, 3)
        seen = []
        for batch, own in dataset.as_numpy_iterator():
            assert len(batch["number"]) == batch_size
            seen += batch["number"][own].tolist()
            np.testing.assert_array_equal(batch["array"][:, 0, 0], batch["number"])
        assert sorted(seen) == list(range(num_records))


def test_taking_one_batch_does_not_change_the_epochs(folder: Path) -> None:
    def epochs(look: bool) -> list[list[int]]:
        dataset = pipelines.read(folder, 8, shuffle_buffer=100, seed=4)
        for _ in range(2 * look):
            with pipelines.peek():
                next(iter(dataset))
        return [numbers.order(dataset) for _ in range(2)]

    assert epochs(look=True) == epochs(look=False)
