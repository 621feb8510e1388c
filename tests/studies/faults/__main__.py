"""`python -m tests.studies.faults`: kills, saves, stalls and a soak test. Appends JSON lines."""

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

# The process must be single-threaded when it forks, and its many children need no BLAS threads.
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

from tests.studies.faults import kills, saves, soak, stalls, table


def main() -> int:
    """Runs the selected experiments, and returns 1 if a guarantee was violated.

    With `--table`, it only writes the page of all results so far.
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
            measured = stalls.start_all(folder, lambda result: note("stalls", result))
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
        reference = folder / strategy / "reference"
        kills.attempt(strategy, reference)
        for seed in range(chosen.seed, chosen.seed + chosen.runs):
            place = folder / strategy / str(seed)
            yield kills.run(strategy, seed, chosen.kills_of_a_run, place, reference)


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.studies.faults", description=__doc__)
    add = parser.add_argument
    kinds = ("kills", "saves", "stalls", "soak")
    add("what", nargs="*", default=list(kinds[:3]), metavar="|".join(kinds))
    add("--strategy", action="append", choices=list(kills.STRATEGIES), help="repeatable")
    add("--runs", type=int, default=4, help="training runs of each strategy (4)")
    add("--kills-of-a-run", type=int, default=5, help="kills in each run (5)")
    add("--kills-of-saves", type=int, default=100, help="kills during saves (100)")
    add("--seed", type=int, default=0, help="seed of the first run (0)")
    add("--seconds", type=float, default=300.0, help="duration of the soak test (300)")
    add("--results", default="faults.jsonl", help="file to append results to")
    add("--table", action="store_true", help="only write the page of all results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
