"""Checkpoints that several ranks write: complete ones only, in a folder and in a bucket."""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from pipelines import object_store, storage
from tests.studies.joint_kills import num_unlisted
from tests.support.commands import require_obstore
from tfdist.checkpoint import joint_save, manifest
from tfdist.checkpoint.joint_save import JointSave, target_at
from tfdist.checkpoint.resume import read_shards
from tfdist.checkpoint.snapshot import OwnShards, Packed, Shard, ShardRange
from tfdist.checkpoint.store import Place, load, store_at
from tfdist.groups.base import shard_sizes

#: Shapes whose shards begin and end within rows.
SHAPES = {"a": (7, 5, 3), "b": (11,), "c": (2, 1, 50), "d": (4, 4)}
TEXT = json.dumps({"paths": {name: name for name in (*SHAPES, "whole")}, "state": {}})


@pytest.fixture(params=["folder", "bucket"])
def folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if request.param == "folder":
        (tmp_path / "checkpoints").mkdir()
        yield str(tmp_path / "checkpoints")
        return
    require_obstore()
    object_store.store_of.cache_clear()
    yield "memory://bucket/checkpoints"
    object_store.store_of.cache_clear()
    assert not [*(tmp_path / "cache").rglob("*variables*")]


def values(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    return {name: random.normal(size=shape) for name, shape in SHAPES.items()}


def part(step: int, rank: int, num_ranks: int) -> Packed:
    """Returns what a rank writes."""
    shards = []
    for name, value in values(step).items():
        sizes = shard_sizes(value.size, num_ranks)
        begin = sum(sizes[:rank])
        own = value.ravel()[begin : begin + sizes[rank]]
        shards.append(Shard(name, value.shape, begin, tf.constant(own)))
    arrays: dict[str, Any] = {} if rank else {"whole": np.full(3, step)}
    return Packed("" if rank else TEXT, arrays, shards)


def save(folder: str, step: int, num_ranks: int, writers: tuple[int, ...] = ()) -> None:
    """Saves as all ranks, or as some of them."""
    for rank in sorted(writers or range(num_ranks), reverse=True):
        own = JointSave(Place(step, 0), f"token{step}", rank, num_ranks, time.monotonic())
        target, packed = target_at(folder, own), part(step, rank, num_ranks)
        report = joint_save.write_part(target, packed, own)
        if not rank:
            joint_save.complete(target, report, packed.text, {"step": step}, own)


def check(folder: str, step: int) -> None:
    packed = load(store_at(folder).path(Place(step, 0)))
    for name, value in {**values(step), "whole": np.full(3, step)}.items():
        np.testing.assert_array_equal(packed.arrays[name], value)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_shards_of_all_ranks_are_one_checkpoint(folder: str, num_ranks: int) -> None:
    save(folder, 1, num_ranks)
    check(folder, 1)
    listed = manifest.read(store_at(folder).path(Place(1, 0)))["files"]
    data = [name for name in listed if ".data-" in name]
    assert len(data) == num_ranks
    assert len(listed) == num_ranks + 2  # the index and the state


def test_save_without_the_part_of_a_rank_leaves_the_checkpoint_before(folder: str) -> None:
    save(folder, 1, 2)
    store = store_at(folder)
    with pytest.raises(OSError, match="rank 1 has not written its part of epoch-0000-step"):
        save(folder, 2, 2, writers=(0,))
    save(folder, 3, 2, writers=(1,))  # rank 0 was killed
    assert store.places() == [Place(1, 0)]
    check(folder, 1)
    store.clean()
    save(folder, 4, 3)
    check(folder, 4)
    assert num_files(folder) == len(manifest.read(store.path(Place(1, 0)))["files"]) + 1 + 6


@pytest.mark.parametrize("num_readers", [2, 3, 4])
def test_ranks_read_their_shards_of_another_number_of_ranks(folder: str, num_readers: int) -> None:
    save(folder, 1, 3)
    path = store_at(folder).path(Place(1, 0))
    for rank in range(num_readers):
        for shard in read_shards(path, own_shards(rank, num_readers)):
            end = shard.begin + len(shard.values)
            wanted = values(1)[shard.name].ravel()[shard.begin : end]
            np.testing.assert_array_equal(shard.values, wanted)
            assert shard.shape == SHAPES[shard.name]
    own = own_shards(0, num_readers)
    assert {*load(path, own).arrays} == {"whole"}
    others_are_whole = OwnShards({"a": own.shards["a"]}, has_copies=False)
    assert {*load(path, others_are_whole).arrays} == {"b", "c", "d", "whole"}


def test_rank_reads_only_files_that_have_its_shards(folder: str) -> None:
    """The file of rank 1 is damaged: others do not notice it, until one reads its shards."""
    save(folder, 1, 3)
    path = store_at(folder).path(Place(1, 0))
    (name,) = (n for n in manifest.read(path)["files"] if "data-00001" in n)
    file = storage.at(path) / name
    file.write_bytes(bytes(len(file.read_bytes())))
    for rank in (0, 2):
        read_shards(path, own_shards(rank, 3))
    load(path, own_shards(0, 3))
    with pytest.raises(manifest.DamagedError, match=name):
        read_shards(path, own_shards(1, 3))
    with pytest.raises(manifest.DamagedError, match=name):
        load(path)


def own_shards(rank: int, num_ranks: int) -> OwnShards:
    shards = {shard.name: shard for shard in part(1, rank, num_ranks).shards}
    ranges = {n: ShardRange(s.shape, s.begin, s.begin + len(s.values)) for n, s in shards.items()}
    return OwnShards(ranges, has_copies=False)


class KilledError(BaseException):
    """Stands for the end of the process."""


def kill_at(number: int, patch: pytest.MonkeyPatch) -> None:
    """Makes a request to the bucket, and all after it, fail as in a process that was killed."""
    import obstore

    requests = itertools.count()

    def until_killed(request: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if next(requests) >= number:
            raise KilledError
        return request(*arguments, **options)

    for name in ("put", "get", "head", "list", "delete"):
        request = functools.partial(until_killed, getattr(obstore, name))
        patch.setattr(obstore, name, request)


@pytest.mark.parametrize("folder", ["bucket"], indirect=True)
def test_kill_at_any_request_leaves_no_files_after_the_next_start(folder: str) -> None:
    save(folder, 1, 2)
    store = store_at(folder)
    for number in itertools.count():
        saved = store.places()[0].step
        try:
            with pytest.MonkeyPatch.context() as patch:
                kill_at(number, patch)
                save(folder, 2 + number, 2)
        except KilledError:
            store.clean()
            assert num_unlisted(folder) == 0, f"killed at request {number}"
            newest = store.places()[0].step
            assert newest in (saved, 2 + number)
            check(folder, newest)
        else:
            break
    assert number > 6  # two parts, a report, the index, the state and the manifest


def test_checkpoint_of_another_run_is_not_changed(folder: str) -> None:
    save(folder, 1, 2)
    own = JointSave(Place(1, 0), "other", 0, 1)
    target, packed = target_at(folder, own), part(2, 0, 1)
    report = joint_save.write_part(target, packed, own)
    with pytest.raises(OSError, match=r"written by another run|not empty"):
        joint_save.complete(target, report, packed.text, {}, own)
    target.discard()
    check(folder, 1)


def num_files(folder: str) -> int:
    if "://" in folder:
        from tests.support import buckets

        return len(buckets.remote(folder).sizes())
    return sum(path.is_file() for path in Path(folder).rglob("*"))
