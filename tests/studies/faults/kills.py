"""Sends SIGKILL at moments derived from a seed, several per training run, and compares results."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.checkpoint.training import newest
from tests.studies.faults import training
from tests.studies.faults.forks import Group, Moment, Report

#: By variant: processes of successive attempts, and the tolerance against an uninterrupted run.
STRATEGIES: dict[str, tuple[tuple[int, ...], float]] = {
    "one_device": ((1,), 0.0),
    "mirrored": ((1,), 0.0),
    "mirrored accumulate": ((1,), 0.0),
    "mirrored mixed_float16": ((1,), 0.0),
    "central_storage": ((1,), 0.0),
    "sharded": ((1,), 0.0),
    "sharded ranks": ((2,), 0.0),
    "pipeline": ((1,), 0.0),
    "tensor_parallel": ((1,), 0.0),
    "parameter_server": ((1,), 0.0),
    "multi_worker": ((2,), 0.0),
    "horovod": ((2,), 0.0),
    # Computed in float64 (`training.DOUBLE`): losses of some hundreds are rounded by 6e-14, and
    # another number of workers adds them up in another order.
    "horovod elastic": ((2, 1, 3), 1e-12),
    "sharded elastic": ((2, 1, 3), 1e-12),
}
PHASES = ("start-up", "step", "save", "evaluation")


def draw(random: np.random.Generator, num_workers: int, saves: bool) -> Moment:
    """Returns a random moment: phases, ranks and counts are uniformly distributed."""
    phase = PHASES[random.integers(len(PHASES))]
    rank = int(random.integers(num_workers))
    if phase == "start-up":
        return Moment(phase, rank, "fork", 1, random.uniform(0.0, 1.5))
    if phase == "step":
        return Moment(phase, rank, "step", int(random.integers(1, 7)), random.uniform(0.0, 0.03))
    if phase == "save":  # if only the chief reports saves, another rank may be in a save as well
        rank = rank if saves else 0
        return Moment(phase, rank, "save", int(random.integers(1, 4)), random.uniform(0.0, 0.03))
    return Moment(phase, rank, "evaluation", int(random.integers(1, 3)), random.uniform(0.0, 0.02))


def attempt(
    strategy: str, folder: Path, moment: Moment | None = None, num_workers: int | None = None
) -> bool:
    """Trains from the newest checkpoint in the folder, and returns whether it was killed.

    Args:
        strategy: The variant to train.
        folder: Folder of its files.
        moment: When to kill a process; None: never.
        num_workers: Number of processes; None: those of the first attempt.

    Raises:
        AssertionError: If it failed without being killed.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def body(report: Report) -> None:
        training.train(strategy, folder, report)

    group = Group(body, num_workers or STRATEGIES[strategy][0][0], folder)
    group.run(moment)
    if not group.sent_at:
        codes = [child.code for child in group.children]
        assert not any(codes), (codes, (folder / "rank-0.log").read_text()[-2000:])
    return bool(group.sent_at)


def run(strategy: str, seed: int, num_kills: int, folder: Path, reference: Path) -> dict[str, Any]:
    """Kills a training run several times, completes it, and compares the results."""
    random, began = np.random.default_rng([seed, *strategy.encode()]), time.monotonic()
    moments = []
    sizes = itertools.cycle(STRATEGIES[strategy][0])
    for num_workers in itertools.islice(sizes, num_kills):
        moment = draw(random, num_workers, strategy in training.BY_RANKS)
        if not attempt(strategy, folder, moment, num_workers):
            break
        moments.append(moment)
    else:
        attempt(strategy, folder, num_workers=next(sizes))
    return {
        "strategy": strategy,
        "seed": seed,
        "kills": [f"{moment.phase}, rank {moment.rank}" for moment in moments],
        "seconds": round(time.monotonic() - began, 1),
        **compare(folder, reference),
    }


def compare(folder: Path, reference: Path) -> dict[str, Any]:
    """Returns the largest differences between two training runs, and the records seen."""
    with np.load(folder / "weights.npz") as one, np.load(reference / "weights.npz") as other:
        assert one.files == other.files
        weights = max(_difference(one[name], other[name]) for name in one.files)
    history, wanted = (json.loads((f / "history.json").read_text()) for f in (folder, reference))
    assert list(history) == list(wanted)
    epochs = {len(values) for values in history.values()}
    files = newest(folder / "checkpoints") == newest(reference / "checkpoints")
    return {
        "weights": weights,
        "history": max(_difference(history[name], wanted[name]) for name in wanted),
        "epochs": sorted(epochs),
        "records": sorted({*history["most"], *history["least"]}),
        "last checkpoint": "equal" if files else "differs",
    }


def _difference(one: Any, other: Any) -> float:
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return float(np.abs(one - other).max()) if one.shape == other.shape else float("inf")


def problems(outcome: dict[str, Any]) -> Sequence[str]:
    """Returns the guarantees that a result violates."""
    bound = STRATEGIES[outcome["strategy"]][1]
    wrong = [name for name in ("weights", "history") if not outcome[name] <= bound]
    if outcome["epochs"] != [training.EPOCHS]:
        wrong.append("epochs")
    if outcome["records"] != [1.0]:  # once in each epoch
        wrong.append("records")
    if bound == 0.0 and outcome["last checkpoint"] != "equal":
        wrong.append("last checkpoint")
    return wrong
