"""Writes the page of faults from results."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from tests.studies.faults.kills import PHASES, STRATEGIES, problems
from tests.support import ROOT

PAGE = ROOT / "tfdist" / "checkpoint" / "FAULTS.md"

_HEAD = """# Fault injection

`python -m tests.studies.faults` measures these results; with `--table` it writes this page.
A training run of 24 steps, with a checkpoint after every second step, is killed (SIGKILL) at
random moments and restarted several times before it completes. The result is compared with the
same run without kills.
"""


def write(results: Path) -> None:
    """Writes the page."""
    found = [json.loads(line) for line in results.read_text().splitlines()]
    by_kind = {kind: [one for one in found if one["kind"] == kind] for kind in _SECTIONS}
    parts = [make(by_kind[kind]) for kind, make in _SECTIONS.items() if by_kind[kind]]
    PAGE.write_text("\n".join([_HEAD, *parts]))


def _rows(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def _kills(found: list[dict[str, Any]]) -> str:
    rows = []
    for strategy in STRATEGIES:
        of_it = [one for one in found if one["strategy"] == strategy]
        kills = Counter(kill.partition(",")[0] for one in of_it for kill in one["kills"])
        if not of_it:
            continue
        exact = [one["last checkpoint"] for one in of_it].count("equal")
        rows.append([
            strategy, len(of_it), sum(kills.values()), *(kills[phase] for phase in PHASES),
            f"{max(one['weights'] for one in of_it):.2g}",
            f"{max(one['history'] for one in of_it):.2g}",
            f"{exact} of {len(of_it)}",
            sum(bool(problems(one)) for one in of_it) or "none",
        ])  # fmt: skip
    head = ["strategy", "runs", "kills", *(f"in {phase}" for phase in PHASES), "weights differ by"]
    head += ["history by", "last checkpoints equal", "violations"]
    return (
        "## Killed\n\nEvery row was seen once in each epoch, and no step was repeated or skipped, "
        "unless the last column counts violations.\n\n" + _rows(head, rows)
    )


def _saves(found: list[dict[str, Any]]) -> str:
    names = ["kills", "whole", "one save old", "older", "cut off", "left over"]
    rows = [[one[name] for name in names] for one in found]
    return (
        "## Killed during continuous saving\n\n*Whole*: the newest checkpoint was intact and "
        "came from a single save. *Cut off*: kills that left an incomplete save, which the next "
        "process removed.\n\n" + _rows(names, rows)
    )


def _stalls(found: list[dict[str, Any]]) -> str:
    names = ["strategy", "stopped", "seconds", "exit code"]
    found = sorted(found, key=lambda one: (one["strategy"], one["stopped"]))
    rows = [[*(one[name] for name in names), _said(one)] for one in found]
    return "## Stopped (SIGSTOP): when the other rank exits\n\n" + _rows([*names, "message"], rows)


def _said(one: dict[str, Any]) -> str:
    """Returns the first sentence that names the rank, without host, process and prefix of a log."""
    if not one["named"]:
        return "an error that does not name the rank"
    message = re.sub(r"^[IWE]\d{4} .*?\] ", "", one["said"])
    return re.sub(r" on \S+ \(pid \d+\)", "", message).partition(". ")[0]


def _soak(found: list[dict[str, Any]]) -> str:
    names = [name for name in found[0] if name != "kind"]
    return "## Soak test: many training runs in one process\n\n" + _rows(
        names, [[one.get(name) for name in names] for one in found]
    )


_SECTIONS = {"kills": _kills, "saves": _saves, "stalls": _stalls, "soak": _soak}
