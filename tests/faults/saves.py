"""Sends SIGKILL to a process that saves all the time: saves stay intact and at most one is
lost.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.faults.forks import Forked, Moment, Report

#: Sizes of the arrays in a save.
SIZES = (10, 1000, 200_000)


def body(folder: Path, report: Report) -> None:
    """Reports what the previous process left, and then saves forever."""
    from tfdist.checkpoint.snapshot import Packed
    from tfdist.checkpoint.store import Place, Store

    store = Store(folder)
    num_torn = len(list(folder.glob(".writing-*")))
    store.clean()
    damaged_lines: list[str] = []
    step, newest = 0, store.load_newest(damaged_lines.append)
    if newest:
        _, packed = newest
        found = {int(value) for array in packed.arrays.values() for value in np.unique(array)}
        assert len(found) == 1, found
        (step,) = found
    report(f"found {step} {len(damaged_lines)} {num_torn} {len(list(folder.glob('.writing-*')))}")
    while True:
        step += 1
        arrays = {f"array {i}": np.full(size, step, "int64") for i, size in enumerate(SIZES)}
        report("save")
        store.write(Place(step, 0), Packed('{"paths": {}, "state": {}}', arrays), {"step": step})
        report(f"saved {step}")
        store.keep(2, None)


def run(num_kills: int, seed: int, folder: Path) -> dict[str, Any]:
    """Kills several savers, and returns how many states were intact and how old they were."""
    folder.mkdir(parents=True)
    random, began = np.random.default_rng(seed), time.monotonic()
    names = ("kills", "whole", "one save old", "older", "cut off", "left over")
    counts = dict.fromkeys(names, 0)
    last_saved = 0  # the last save that is known to be complete
    for number in range(num_kills + 1):  # the last one inspects the result of the last kill
        moment = Moment("save", 0, "save", int(random.integers(1, 5)), random.uniform(0, 0.02))
        child = Forked(lambda report: body(folder / "saves", report), {}, folder / "log")
        found = _until(child, moment)
        child.signal(9)
        while not child.ended():
            time.sleep(0.001)
        assert child.code == -9, (folder / "log").read_text()[-2000:]
        step, damaged, torn, left = found
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
