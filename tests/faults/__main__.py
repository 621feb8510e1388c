"""`python -m tests.faults`: kills, saves, stalls and a soak, with figures as lines of JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# One thread until something is forked, and none of BLAS's in each of many small processes.
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

from tests.faults import kills, saves, soak, stalls, table


def main() -> int:
    """Runs what the flags say and appends results; returns 1 where something was not as promised.

    With `--table` it only writes the page of all results so far.
    """
    chosen = _flags()
    results = Path(chosen.results)
    if chosen.table:
        table.write(results)
        return 0
    failed = False

    def note(kind: str, result: dict[str, Any]) -> None:
        nonlocal failed
        wrong = list(kills.problems(result)) if kind == "kills" else []
        line = json.dumps({"kind": kind, **result, **({"WRONG": wrong} if wrong else {})})
        failed |= bool(wrong)
        print(line, flush=True)
        with results.open("a") as file:
            print(line, file=file)

    with tempfile.TemporaryDirectory(prefix="tfdist-faults-") as name:
        folder = Path(name)
        if "kills" in chosen.what:
            for result in _kills(chosen, folder):
                note("kills", result)
        if "saves" in chosen.what:
            note("saves", saves.run(chosen.kills_of_saves, chosen.seed, folder / "saves"))
        if "stalls" in chosen.what:
            measured = stalls.all_at_once(folder, lambda result: note("stalls", result))
            while not all(child.ended() for child in measured):
                time.sleep(0.2)
            if any(child.code for child in measured):
                print((folder / "stalls.log").read_text(), file=sys.stderr)
                failed = True
        if "soak" in chosen.what:
            note("soak", soak.run(chosen.seconds, folder))
    return int(failed)


def _kills(chosen: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    for strategy in chosen.strategy or kills.STRATEGIES:
        whole = folder / strategy / "whole"
        kills.attempt(strategy, whole)
        for seed in range(chosen.seed, chosen.seed + chosen.runs):
            place = folder / strategy / str(seed)
            yield kills.run(strategy, seed, chosen.kills_of_a_run, place, whole)


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    add = parser.add_argument
    kinds = ("kills", "saves", "stalls", "soak")
    add("what", nargs="*", default=list(kinds[:3]), metavar="|".join(kinds))
    add("--strategy", action="append", choices=list(kills.STRATEGIES), help="once for each")
    add("--runs", type=int, default=4, help="trainings of each strategy (4)")
    add("--kills-of-a-run", type=int, default=5, help="in each of them (5)")
    add("--kills-of-saves", type=int, default=100, help="(100)")
    add("--seed", type=int, default=0, help="of the first training (0)")
    add("--seconds", type=float, default=300.0, help="of the soak (300)")
    add("--results", default="faults.jsonl", help="file that results are added to")
    add("--table", action="store_true", help="only write the page of the results so far")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
