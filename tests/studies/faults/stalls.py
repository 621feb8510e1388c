"""Stops a rank with SIGSTOP: how long the others take to exit, and whether they report it."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

from tests.studies.faults import training
from tests.studies.faults.forks import Forked, Group, Moment, Report

#: When a rank of two is stopped, under `multi_worker` and `horovod`.
MOMENTS = (
    Moment("start-up", 1, "fork", 1, 0.5),
    Moment("an exchange of one number", 1, "step", 3, 0.0),
    Moment("evaluation", 1, "evaluation", 1, 0.0),
    Moment("a save", 0, "save", 2, 0.0),
)


def measure(strategy: str, moment: Moment, folder: Path) -> dict[str, Any]:
    """Stops a rank, and returns when the other one exits and what it prints."""
    folder.mkdir(parents=True)
    group = Group(lambda report: training.train(strategy, folder, report), 2, folder)
    group.run(moment, signal.SIGSTOP)
    seconds = time.monotonic() - group.sent_at
    other = group.children[1 - moment.rank]
    said = (folder / f"rank-{1 - moment.rank}.log").read_text()
    named = re.search(rf"^.*\b(rank|worker|task:|process) ?{moment.rank}\b.*$", said, re.M | re.I)
    return {
        "strategy": strategy,
        "stopped": f"rank {moment.rank} in {moment.phase}",
        "seconds": round(seconds, 1),
        "exit code": other.code,
        "named": bool(named),
        "said": named[0].strip()[:200] if named else said.strip().rpartition("\n")[2][:200],
    }


def start_all(folder: Path, write: Any) -> list[Forked]:
    """Starts every measurement in a subprocess, which passes its result to `write`."""

    def one(strategy: str, moment: Moment) -> Forked:
        place = folder / f"{strategy}-{moment.phase}".replace(" ", "-")

        def body(_: Report) -> None:
            write(measure(strategy, moment, place))

        return Forked(body, {}, folder / "stalls.log")

    return [one(strategy, m) for strategy in ("multi_worker", "horovod") for m in MOMENTS]
