"""Data resume at any position with exactly the batches that follow."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import pipelines
from tests.support import numbers
from tfdist.checkpoint.snapshot import Packed, Snapshot
from tfdist.loops.data_handler import DataHandler
from tfdist.strategies.one_device import OneDevice
from tfdist.upstream import input_data

ROWS = np.arange(20)
EPOCHS, BATCH = 3, 2
#: Steps at which data are interrupted: in the first epoch, in later epochs, and at the end.
POSITIONS = (3, 12, 24, 30)
KINDS = [
    "arrays", "arrays, within batches", "read", "mix", "dataset", "Python function", "endless",
    "PyDataset", "generator",
]  # fmt: skip


class Shuffled(keras.utils.PyDataset):
    """Shuffles its batches after each epoch, with a seed."""

    def __init__(self) -> None:
        super().__init__()
        self._random, self._order = np.random.default_rng(5), np.arange(10)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[np.ndarray]:
        return (ROWS[self._order[index] * 2 :][:2],)

    def on_epoch_end(self) -> None:
        self._order = self._random.permutation(10)


def generator() -> Iterator[tuple[np.ndarray]]:
    for number in range(1000):
        yield (np.arange(number, number + 2),)


def _number(batch: dict[str, tf.Tensor]) -> tf.Tensor:
    return batch["number"]


def kinds(folder: Path) -> dict[str, tuple[Callable[[], Any], dict[str, Any]]]:
    """Returns a dataset factory and `DataHandler` options for each kind of data."""
    shards = folder / "shards"
    numbers.write(shards, num_records=20, num_shards=3)
    reading: dict[str, Any] = {"batch_size": BATCH, "shuffle_buffer": 7, "batch_fn": _number}

    def shuffled() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(ROWS).shuffle(20, seed=1).batch(BATCH)

    def read() -> tf.data.Dataset:
        return pipelines.read(shards, seed=2, **reading)

    def mixed() -> tf.data.Dataset:
        sources = [pipelines.Source(shards, 1.0), pipelines.Source(shards, 2.0)]
        return pipelines.mix(sources, num_batches=10, seed=2, **reading)

    def python_function() -> tf.data.Dataset:
        return shuffled().map(lambda rows: tf.numpy_function(np.copy, [rows], tf.int64))

    return {
        "arrays": (lambda: ROWS, {"batch_size": BATCH, "shuffle": True}),
        "arrays, within batches": (lambda: ROWS, {"batch_size": BATCH, "shuffle": "batch"}),
        "read": (read, {}),
        "mix": (mixed, {}),
        "dataset": (shuffled, {}),
        "Python function": (python_function, {}),
        "endless": (lambda: shuffled().repeat(), {"steps_per_epoch": 10}),
        "PyDataset": (Shuffled, {}),
        "generator": (generator, {"steps_per_epoch": 10}),
    }


def iterate(feed: DataHandler, position: int = 0) -> Iterator[tuple[int, list[int]]]:
    """Yields every step from a position on, with its rows."""
    first = max(position - 1, 0) // 10  # an epoch is open until it ends
    for epoch in range(first, EPOCHS):
        step = position - 10 * epoch if epoch == first else 0
        iterator = feed.begin_epoch(step)
        while step < 10:
            (share,) = OneDevice().feed.unpack(next(iterator)).shares
            step += 1
            yield epoch * 10 + step, np.ravel(share.rows).tolist()
        feed.end_epoch(step, exhausted=False)


def write_and_read(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True)
    ones = np.ones(1)  # a snapshot needs at least one variable
    Snapshot({"v": ones}, {"v": "v"}, state).packed().write(str(folder))
    assert json.loads((folder / "state.json").read_text())
    return Snapshot.unpacked(Packed.read(str(folder))).state


@pytest.mark.parametrize(
    "positions",
    [
        pytest.param(POSITIONS, id="few"),
        pytest.param(range(1, 31), id="all", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(("kind", "seeded"), [*((kind, True) for kind in KINDS), ("arrays", False)])
def test_resumes_at_any_position(
    kind: str,
    seeded: bool,
    positions: Collection[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make, options = kinds(tmp_path)[kind]
    keras.utils.set_random_seed(4)
    if not seeded:
        monkeypatch.setattr(input_data, "seed_of_process", lambda: None)
    feed, rows, states = DataHandler(OneDevice(), make(), training=True, **options), [], {}
    for position, found in iterate(feed):
        rows.append(found)
        if position in positions:
            step = (position - 1) % 10 + 1
            states[position] = write_and_read(feed.state(step), tmp_path / str(position))
    assert len(states) == len(positions)
    for position, state in states.items():
        resumed = DataHandler(OneDevice(), make(), training=True, **options)
        resumed.restore(state)
        rest = [found for _, found in iterate(resumed, position)]
        assert rest == rows[position:], position


def test_unseeded_arrays_are_reshuffled_in_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_data, "seed_of_process", lambda: None)
    feed = DataHandler(OneDevice(), ROWS, batch_size=BATCH, shuffle=True)
    rows = [found for _, found in iterate(feed)]
    orders = [[*itertools.chain(*rows[begin : begin + 10])] for begin in (0, 10, 20)]
    assert [sorted(order) for order in orders] == [ROWS.tolist()] * 3
    assert len({tuple(order) for order in orders}) == 3


def test_seeded_arrays_have_the_order_of_keras() -> None:
    keras.utils.set_random_seed(4)
    adapter = input_data.data_adapter(ROWS, batch_size=BATCH, shuffle=True)
    wanted = [np.ravel(batch).tolist() for batch in adapter.get_tf_dataset()]
    feed = DataHandler(OneDevice(), ROWS, batch_size=BATCH, shuffle=True)
    assert [found for _, found in iterate(feed)] == wanted * 3
