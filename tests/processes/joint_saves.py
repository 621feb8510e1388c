"""Scenarios in which two processes write the shards of one checkpoint."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np

import tfdist
from tests.support.training import FIT, momentum
from tfdist.checkpoint import joint_save, manifest, resume
from tfdist.checkpoint.joint_save import JointSave, Target
from tfdist.checkpoint.resume import read_shards as _read_shards
from tfdist.checkpoint.snapshot import OwnShards, Packed, Shard
from tfdist.checkpoint.store import store_at
from tfdist.errors import ConfigurationError
from tfdist.strategies.base import Strategy
from tfdist.strategies.sharded.strategy import Sharded
from tfdist.trainer import Trainer

NUM_EPOCHS = 3


def run(shared: str, bucket: str) -> dict[str, Any]:
    """Runs all scenarios in each of two processes; returns the results of rank 0."""
    strategy = Sharded(smallest=2, shard="gradients", process_group="tensorflow")
    results: dict[str, Any] = {"folders": {}, "failures": {}}
    for folder in (shared, bucket):
        _fit(strategy, folder)
        results["folders"][folder] = _sizes(folder) if strategy.group.is_chief else {}
    results["resumed"] = _resume(f"{shared}-resumed")
    results["by time"] = _num_saved_by_the_clock_of_rank_0(strategy, f"{shared}-by-time")
    for name, failing in {"first": {0}, "last": {2}, "last twice": {2, 3}}.items():
        lines = _fit_with_failures(strategy, f"{shared}-{name}", failing)
        results["failures"][name] = strategy.group.gather_objects(lines)
    results["not shared"] = strategy.group.gather_objects(
        _in_folders_of_two_hosts(strategy, shared)
    )
    return results


def _fit(
    strategy: Strategy, folder: str, every: str = "epoch", epochs: int = NUM_EPOCHS
) -> keras.Model:
    checkpoints = tfdist.Checkpoints(folder, every=every, keep=9)
    trainer = Trainer(momentum, strategy, checkpoints=checkpoints, steps_per_call=1)
    trainer.fit(**FIT, epochs=epochs)
    return trainer.model


def _resume(folder: str) -> tuple[list[np.ndarray], list[list[int]]]:
    """Resumes with weights that no process has whole.

    Returns:
        The weights at the end, and the numbers of elements that each rank has read itself.
    """
    strategy = Sharded(smallest=2, shard="parameters", process_group="tensorflow")
    _fit(strategy, folder)
    read: list[int] = []

    def read_shards(path: str, own: OwnShards) -> list[Shard]:
        shards = _read_shards(path, own)
        read.extend(len(shard.values) for shard in shards)
        return shards

    with mock.patch.object(resume, "read_shards", read_shards):
        weights = _fit(strategy, folder, epochs=NUM_EPOCHS + 1).get_weights()
    return weights, strategy.group.gather_objects(read)


def _sizes(folder: str) -> dict[str, int]:
    """Returns the bytes of the files of the newest checkpoint, without tokens in their names."""
    store = store_at(folder)
    listed = manifest.read(store.path(store.places()[0]))["files"]
    return {name.partition(".")[2]: entry["bytes"] for name, entry in listed.items()}


def _num_saved_by_the_clock_of_rank_0(strategy: Strategy, folder: str) -> int:
    """Returns the number of checkpoints if each call is due on rank 0, none on rank 1."""
    with mock.patch.object(tfdist.Checkpoints, "seconds", 3600.0 if strategy.group.rank else 1e-9):
        _fit(strategy, folder, "1h")
    return len(store_at(folder).places())


def _fit_with_failures(strategy: Strategy, folder: str, failing: set[int]) -> tuple[str, list[int]]:
    """Lets rank 1 fail to write its part of some saves, by their numbers.

    Returns:
        What this rank prints and raises, and the epochs of the checkpoints.
    """
    write, num_saves = joint_save.write_part, 0

    def write_part(target: Target, packed: Packed, save: JointSave) -> Any:
        nonlocal num_saves
        num_saves += 1
        if strategy.group.rank == 1 and num_saves - 1 in failing:
            raise OSError("the disk is full")
        return write(target, packed, save)

    with (
        contextlib.redirect_stderr(io.StringIO()) as lines,
        mock.patch.object(joint_save, "write_part", write_part),
    ):
        try:
            _fit(strategy, folder)
        except ConfigurationError as error:
            lines.write(f"error: {error}")
    strategy.group.barrier()
    left = [path.name for path in Path(folder).glob(".writing-*")]
    assert not left or failing == {2, 3}, left
    return lines.getvalue(), [place.epoch for place in store_at(folder).places()]


def _in_folders_of_two_hosts(strategy: Strategy, folder: str) -> tuple[str, int]:
    """Returns what each rank prints, and its number of checkpoints, if each has its own disk.

    The training is resumed once.
    """
    own = f"{folder}-host-{strategy.group.rank}"
    with contextlib.redirect_stderr(io.StringIO()) as lines:
        for epochs in (NUM_EPOCHS, NUM_EPOCHS + 1):
            _fit(strategy, own, epochs=epochs)
    return lines.getvalue(), len(store_at(own).places())
