"""Each record is read once per epoch in a reproducible order; damaged folders are rejected."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import pipelines
from pipelines.reading.order import Windows
from tests.support import numbers

quick = settings(deadline=None, max_examples=6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    numbers.write(tmp_path, num_records=100, num_shards=4)
    return tmp_path


@quick
@given(
    num_records=st.integers(1, 60),
    num_shards=st.integers(1, 20),
    batch_size=st.integers(1, 17),
    shuffle_buffer=st.sampled_from([0, 1, 7, 100]),
    seed=st.sampled_from([None, 5]),
    last_batch=st.sampled_from(["keep", "drop"]),
)
def test_each_record_once_an_epoch(
    num_records: int, num_shards: int, batch_size: int, last_batch: str, **shuffling: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        numbers.write(Path(directory), num_records, num_shards)
        dataset = pipelines.read(directory, batch_size, last_batch=last_batch, **shuffling)
        full, rest = divmod(num_records, batch_size)
        assert dataset.cardinality() == full + (rest > 0 and last_batch == "keep")
        for _ in range(2):
            seen = numbers.order(dataset)
            assert len(seen) == len(set(seen)) == num_records - (last_batch == "drop") * rest
            assert set(seen) <= set(range(num_records))


@settings(deadline=None, max_examples=4)
@given(
    num_records=st.integers(8, 60),
    num_shards=st.integers(1, 9),
    workers=st.integers(1, 4),
    seed=st.sampled_from([None, 5]),
)
def test_each_record_on_one_worker(
    num_records: int, num_shards: int, workers: int, seed: int | None
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        numbers.write(Path(directory), num_records, num_shards)
        seen = []
        for worker in range(workers):
            context = tf.distribute.InputContext(workers, worker, workers)
            dataset = pipelines.read(
                directory, 3 * workers, shuffle_buffer=10, seed=seed, context=context
            )
            own = numbers.order(dataset)
            assert dataset.cardinality() == -(-len(own) // 3)
            seen += own
        assert sorted(seen) == list(range(num_records))


def test_contents_and_spec(folder: Path) -> None:
    dataset = pipelines.read(folder, 10)
    assert dataset.element_spec == {
        "number": tf.TensorSpec((None,), tf.int32),
        "array": tf.TensorSpec((None, 2, 3), tf.uint8),
    }
    for batch in dataset.as_numpy_iterator():
        expected = np.broadcast_to(batch["number"][:, None, None], batch["array"].shape)
        np.testing.assert_array_equal(batch["array"], expected)


def test_order_depends_on_the_seed(folder: Path) -> None:
    def epochs(seed: int) -> list[list[int]]:
        dataset = pipelines.read(folder, 10, shuffle_buffer=200, seed=seed)
        return [numbers.order(dataset) for _ in range(3)]

    first, again, other = epochs(1), epochs(1), epochs(2)
    assert first == again
    assert len({tuple(order) for order in first + other}) == 6


def test_order_without_shuffling_is_fixed(folder: Path) -> None:
    """Record i is in shard i % 4."""
    expected = [i for shard in range(4) for i in range(shard, 100, 4)]
    assert numbers.order(pipelines.read(folder, 10)) == expected


def test_files_are_shuffled_too(tmp_path: Path) -> None:
    """The first record of an epoch comes from any file, though the buffer holds only one record."""
    numbers.write(tmp_path, num_records=400, num_shards=4)
    dataset = pipelines.read(tmp_path, 10, shuffle_buffer=1, seed=3)
    first = [next(dataset.as_numpy_iterator())["number"][0] for _ in range(15)]
    assert set(first) == {0, 1, 2, 3}


def test_map_fn_and_batch_fn_are_applied(folder: Path) -> None:
    dataset = pipelines.read(
        folder,
        25,
        map_fn=lambda example: {"number": example["number"] * 2},
        batch_fn=lambda batch: {"number": batch["number"] + tf.shape(batch["number"])[0]},
    )
    assert sorted(numbers.order(dataset)) == [2 * i + 25 for i in range(100)]


def test_first_batch_needs_a_part_of_the_shuffle_buffer(tmp_path: Path) -> None:
    """Shards after the first 8 blocks are gone, of 32 in the buffer."""
    feature = pipelines.Feature(name="number", dtype="int32", shape=(20_000,))
    examples = ({"number": np.full(20_000, i, np.int32)} for i in range(64))
    pipelines.write_shards(examples, tmp_path, [feature], num_shards=32, source="numbers")
    whole, dataset = (pipelines.read(tmp_path, 8, shuffle_buffer=64, seed=1) for _ in range(2))
    seen = [int(row[0]) for batch in whole for row in batch["number"]]
    assert sorted(seen) == list(range(64))
    first = {number % 32 for number in seen[:16]}
    assert len(first) == 8
    for number, path in enumerate(sorted(tmp_path.glob("*.tfrecord"))):
        if number not in first:
            path.unlink()
    assert [int(row[0]) for row in next(iter(dataset))["number"]] == seen[:8]


@given(first=st.integers(1, 9), largest=st.integers(1, 40), position=st.integers(0, 99))
def test_windows_grow_up_to_the_shuffle_buffer(first: int, largest: int, position: int) -> None:
    windows = Windows(first, largest)
    sizes = windows.sizes(tf.constant(0, tf.int64), tf.constant(200)).numpy()
    assert max(sizes) == largest
    assert all(small in (large, large / 2) or large == largest for small, large in pairwise(sizes))
    number, begin = windows.containing(tf.constant(position, tf.int64))
    assert begin == sum(sizes[:number]) <= position < begin + sizes[number]
    rest = windows.sizes(number, tf.constant(100)).numpy()
    assert list(rest[:50]) == list(sizes[number:][:50])


def test_maps_keep_the_order(folder: Path) -> None:
    plain = pipelines.read(folder, 10, shuffle_buffer=50, seed=1)
    mapped = pipelines.read(folder, 10, shuffle_buffer=50, seed=1, map_fn=lambda example: example)
    assert numbers.order(plain) == numbers.order(mapped)


def test_more_workers_than_records(tmp_path: Path) -> None:
    numbers.write(tmp_path, num_records=2, num_shards=1)
    with pytest.raises(pipelines.DataError, match="at least one record for each of 3 input"):
        pipelines.read(tmp_path, 3, context=tf.distribute.InputContext(3, 2, 3))


@pytest.mark.parametrize(("batch_size", "workers"), [(0, 1), (10, 3)])
def test_invalid_batch_size_raises(folder: Path, batch_size: int, workers: int) -> None:
    with pytest.raises(
        ValueError, match=f"batch_size: expected a positive multiple of the {workers}"
    ):
        pipelines.read(folder, batch_size, context=tf.distribute.InputContext(workers, 0, workers))


@pytest.mark.parametrize("option", ["last_batch", "on_corrupt"])
def test_unknown_option_values_raise(tmp_path: Path, option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}: expected one of .*, got 'foo'"):
        pipelines.read(tmp_path, 4, **{option: "foo"})


def rewrite_index(folder: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    index = json.loads((folder / "index.json").read_text())
    change(index["shards"])
    (folder / "index.json").write_text(json.dumps(index))


def list_twice(shards: list[dict[str, Any]]) -> None:
    shards.append({**shards[0], "name": f"./{shards[0]['name']}"})


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


OUTSIDE = "expected the name of a file inside the folder"
#: By name: what happens to a folder, and the message of the error.
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "expected the index of a folder of shards"),
    "other index": (
        lambda folder: (folder / "index.json").write_text('{"version": 1, "source": "numbers"}'),
        r"index\.json: not an index of this version",
    ),
    "missing shard": (
        lambda folder: numbers.shard(folder, 2).unlink(),
        r"data-00002-of-00004\.tfrecord: .* the file is missing",
    ),
    "truncated shard": (
        lambda folder: truncate(numbers.shard(folder, 1)),
        r"data-00001-of-00004\.tfrecord: expected .* bytes, found",
    ),
    "shard listed twice": (lambda folder: rewrite_index(folder, list_twice), "is listed 2 times"),
    **{
        f"name {name!r}": (
            lambda folder, name=name: rewrite_index(folder, lambda s: s[0].update(name=name)),
            OUTSIDE,
        )
        for name in ("../other/data.tfrecord", "/etc/hostname", "a/../../b", "")
    },
}


@pytest.mark.parametrize("name", DAMAGES)
def test_unusable_folder_raises(folder: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    damage(folder)
    with pytest.raises(pipelines.DataError, match=message):
        pipelines.read(folder, 10)


@pytest.mark.parametrize("ram_bytes", [None, 2**20])
def test_only_a_chosen_memory_bound_turns_autotuning_on(
    folder: Path, ram_bytes: int | None
) -> None:
    dataset = pipelines.read(folder, 10, tuning=pipelines.Tuning(ram_bytes=ram_bytes))
    assert (dataset.options().autotune.enabled is not False) == (ram_bytes is not None)
