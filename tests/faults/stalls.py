"""A rank that is stopped (SIGSTOP): after how long the others end, and whether they name it."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

from tests.faults import training
from tests.faults.forks import Forked, Group, Moment, Tell

#: Where a rank is stopped; of two, which train by `multi_worker` or `horovod`.
MOMENTS = (
    Moment("start-up", 1, "fork", 1, 0.5),
    Moment("an exchange of one number", 1, "step", 3, 0.0),
    Moment("evaluation", 1, "evaluation", 1, 0.0),
    Moment("a save", 0, "save", 2, 0.0),
)


def measure(strategy: str, moment: Moment, folder: Path) -> dict[str, Any]:
    """Stops a rank; returns the seconds until the other has ended, and what it said."""
    folder.mkdir(parents=True)
    group = Group(lambda tell: training.train(strategy, folder, tell), 2, folder)
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


def all_at_once(folder: Path, write: Any) -> list[Forked]:
    """Starts every measurement in a process of its own, which hands its result to `write`."""

    def one(strategy: str, moment: Moment) -> Forked:
        place = folder / f"{strategy}-{moment.phase}".replace(" ", "-")

        def body(_: Tell) -> None:
            write(measure(strategy, moment, place))

        return Forked(body, {}, folder / "stalls.log")

    return [one(strategy, m) for strategy in ("multi_worker", "horovod") for m in MOMENTS]
