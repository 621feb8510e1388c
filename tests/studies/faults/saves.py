"""Kills a process that saves all the time: saves stay intact, and at most one is lost."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.studies.faults.forks import Forked, Moment, Report
from tfdist.checkpoint.lock import lock_of
from tfdist.checkpoint.snapshot import Packed
from tfdist.checkpoint.store import Place, store_at

#: Sizes of the arrays in a save.
SIZES = (10, 1000, 200_000)


def packed(step: int, sizes: Sequence[int] = SIZES) -> Packed:
    """Returns a snapshot of arrays that consist of the number of the step."""
    arrays = {f"array {i}": np.full(size, step, "int64") for i, size in enumerate(sizes)}
    return Packed('{"paths": {}, "state": {}}', arrays)


def step_of(saved: Packed) -> int:
    """Returns the number of the step of a snapshot, whose arrays must be of one step."""
    (step,) = {int(value) for array in saved.arrays.values() for value in np.unique(array)}
    return step


def save_forever(location: str, sizes: Sequence[int], report: Report) -> None:
    """Reports what the previous process left, and then saves until it is killed."""
    store, num_torn = store_at(location), _num_unfinished(location)
    lock_of(location).acquire()
    damaged_lines: list[str] = []
    newest = store.load_newest(damaged_lines.append)
    store.clean()
    first = step_of(newest[1]) if newest else 0
    report(f"found {first} {len(damaged_lines)} {num_torn} {_num_unfinished(location)}")
    for step in itertools.count(first + 1):
        report("save")
        store.write(Place(step, 0), packed(step, sizes), {"step": step})
        report(f"saved {step}")
        store.keep(2, None)


def _num_unfinished(location: str) -> int:
    """Returns the number of saves in a local folder that were not completed."""
    return 0 if "://" in location else len(list(Path(location).glob(".writing-*")))


def run(
    num_kills: int,
    seed: int,
    folder: Path,
    location: str = "",
    sizes: Sequence[int] = SIZES,
    longest_delay: float = 0.02,
) -> dict[str, Any]:
    """Kills several savers, and returns how many states were intact and how old they were.

    Args:
        num_kills: Number of kills.
        seed: Seed of the moments.
        folder: Local folder for a log.
        location: Folder or URL of the checkpoints; default: a subfolder.
        sizes: Sizes of the arrays in a save.
        longest_delay: Of a kill after the beginning of a save, in seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = location or str(folder / "saves")
    random, began = np.random.default_rng(seed), time.monotonic()
    names = ("kills", "whole", "one save old", "older", "cut off", "left over")
    counts = dict.fromkeys(names, 0)
    last_saved = 0  # the last save that is known to be complete
    for number in range(num_kills + 1):  # the last one inspects the result of the last kill
        delay = random.uniform(0, longest_delay)
        moment = Moment("save", 0, "save", int(random.integers(1, 5)), delay)
        child = Forked(lambda report: save_forever(place, sizes, report), {}, folder / "log")
        result = _until(child, moment)
        child.signal(signal.SIGKILL)
        while not child.ended():
            time.sleep(0.001)
        assert child.code == -signal.SIGKILL, (folder / "log").read_text()[-2000:]
        step, damaged, torn, left = result
        if number:
            counts["kills"] += 1
            counts["whole"] += int(damaged == 0 and (step > 0 or last_saved == 0))
            counts["one save old"] += int(step == last_saved - 1)
            counts["older"] += int(step < last_saved - 1)
            counts["cut off"] += torn
            counts["left over"] += left
        saved = [int(mark.split()[1]) for mark in child.marks if mark.startswith("saved")]
        last_saved = saved[-1] if saved else max(last_saved, step)
    return {**counts, "seconds": round(time.monotonic() - began, 1)}


def _until(child: Forked, moment: Moment) -> list[int]:
    """Reads marks until a moment, and returns what the child found."""
    while child.marks.count("save") < moment.count:
        child.read_marks()
        assert not child.ended(), child.marks
    time.sleep(moment.delay)
    (found,) = [mark for mark in child.marks if mark.startswith("found")]
    return [int(word) for word in found.split()[1:]]
