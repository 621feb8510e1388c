"""SIGKILL at moments that follow from a seed, several in each training, and what comes of it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.checkpoint.training import newest
from tests.faults import training
from tests.faults.forks import Group, Moment, Tell

#: By strategy: processes, and how far weights and history may be from those of nobody's kill.
STRATEGIES = {
    "one_device": (1, 0.0),
    "mirrored": (1, 0.0),
    "parameter_server": (1, 1e-6),
    "multi_worker": (2, 1e-6),
    "horovod": (2, 1e-6),
}
PHASES = ("start-up", "step", "save", "evaluation")


def draw(random: np.random.Generator, num_workers: int) -> Moment:
    """Returns the next moment: each phase, rank and count is as likely as the others."""
    phase = PHASES[random.integers(len(PHASES))]
    rank = int(random.integers(num_workers))
    if phase == "start-up":
        return Moment(phase, rank, "fork", 1, random.uniform(0.0, 1.5))
    if phase == "step":
        return Moment(phase, rank, "step", int(random.integers(1, 7)), random.uniform(0.0, 0.03))
    if phase == "save":  # of which the chief alone tells; another one dies meanwhile, too
        return Moment(phase, 0, "save", int(random.integers(1, 4)), random.uniform(0.0, 0.03))
    return Moment(phase, rank, "evaluation", int(random.integers(1, 3)), random.uniform(0.0, 0.02))


def attempt(strategy: str, folder: Path, moment: Moment | None = None) -> bool:
    """Trains, from where the folder stands; returns whether it was killed.

    Raises:
        AssertionError: It failed by itself.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def body(tell: Tell) -> None:
        training.train(strategy, folder, tell)

    group = Group(body, STRATEGIES[strategy][0], folder)
    group.run(moment)
    if not group.sent_at:
        codes = [child.code for child in group.children]
        assert not any(codes), (codes, (folder / "rank-0.log").read_text()[-2000:])
    return bool(group.sent_at)


def run(strategy: str, seed: int, num_kills: int, folder: Path, whole: Path) -> dict[str, Any]:
    """Kills a training so often, lets it end, and returns what came of it.

    Args:
        strategy: By which it is trained.
        seed: Of the moments.
        num_kills: How often it is killed, at most: it may end before the last.
        folder: For its files.
        whole: Of the same training that nobody killed.
    """
    random, began = np.random.default_rng([seed, *strategy.encode()]), time.monotonic()
    moments = []
    for _ in range(num_kills):
        moment = draw(random, STRATEGIES[strategy][0])
        if not attempt(strategy, folder, moment):
            break
        moments.append(moment)
    else:
        attempt(strategy, folder)
    return {
        "strategy": strategy,
        "seed": seed,
        "kills": [f"{moment.phase}, rank {moment.rank}" for moment in moments],
        "seconds": round(time.monotonic() - began, 1),
        **compare(folder, whole),
    }


def compare(folder: Path, whole: Path) -> dict[str, Any]:
    """Returns how far a training is from another: the largest differences, and its records."""
    with np.load(folder / "weights.npz") as one, np.load(whole / "weights.npz") as other:
        assert one.files == other.files
        weights = max(_difference(one[name], other[name]) for name in one.files)
    history, wanted = (json.loads((f / "history.json").read_text()) for f in (folder, whole))
    assert list(history) == list(wanted)
    epochs = {len(values) for values in history.values()}
    files = newest(folder / "checkpoints") == newest(whole / "checkpoints")
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
    """Returns what of an outcome is not as promised."""
    bound = STRATEGIES[outcome["strategy"]][1]
    wrong = [name for name in ("weights", "history") if not outcome[name] <= bound]
    if outcome["epochs"] != [training.EPOCHS]:
        wrong.append("epochs")
    if outcome["records"] != [1.0]:  # each once in each epoch
        wrong.append("records")
    if bound == 0.0 and outcome["last checkpoint"] != "equal":
        wrong.append("last checkpoint")
    return wrong
