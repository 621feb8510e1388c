"""`python -m tests.studies.faults.signals`: which signal, when, to a run that was started how.

Each run gets one signal, or two, at one moment. Appends JSON lines with the exit code and what was
saved, without repeating those that the file has; `--table` writes docs/signals.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.support import ROOT

SIGNALS = {
    "SIGINT (Ctrl-C)": (signal.SIGINT,),
    "SIGINT twice": (signal.SIGINT, signal.SIGINT),
    "SIGTERM": (signal.SIGTERM,),
    "SIGTERM twice": (signal.SIGTERM, signal.SIGTERM),
    "SIGUSR1": (signal.SIGUSR1,),
    "SIGHUP": (signal.SIGHUP,),
}
MOMENTS = ("starting", "tracing", "training", "saving", "evaluating")
STARTERS = ("shell", "nohup", "launcher", "mpirun", "Slurm's variables")
#: A second signal is sent only to what tfdist starts and to a plain process.
_STARTERS_OF_TWO = ("shell", "launcher")
_RECIPE = str(ROOT / "tests" / "studies" / "faults" / "signalled.py")
_SLURM = {
    **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    **{"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "localhost"},
    **{"SLURM_STEP_TASKS_PER_NODE": "1", "SLURMD_NODENAME": "localhost"},
}
_OPEN_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_BETWEEN_SIGNALS, _LIMIT = 0.3, 180.0
_PAGE = ROOT / "docs" / "signals.md"


class Cell(NamedTuple):
    signals: str
    moment: str
    starter: str


def command(starter: str, folder: Path) -> list[str]:
    """Returns the command of a run. The launcher and mpirun start two workers."""
    python = [sys.executable, "-u", "-m"]
    flags = ["--recipe", _RECIPE, f"--run-dir={folder / 'run'}", "--checkpoint-every=2"]
    flags += [f"--data-dir={folder / 'data'}", "--verbose=2"]
    train = [*python, "tfdist.train", *flags]
    if starter == "launcher":
        return [*python, "tfdist.launch", "--num-workers=2", "--grace=120", *flags]
    if starter == "mpirun":
        return ["mpirun", "--oversubscribe", "-np", "1", *train, "--strategy=horovod"]
    one_device = [*train, "--strategy=one_device"]
    return ["nohup", *one_device] if starter == "nohup" else one_device


def run(cell: Cell) -> dict[str, Any]:
    """Starts a run, sends the signals, and returns how it ended."""
    with tempfile.TemporaryDirectory(prefix="tfdist-signals-") as name:
        folder = Path(name)
        places = {"TFDIST_TEST_MOMENT": cell.moment, "TFDIST_TEST_FOLDER": name}
        environ = {**os.environ, **_OPEN_MPI, **places, "PYTHONPATH": str(ROOT)}
        environ |= _SLURM if cell.starter.startswith("Slurm") else {}
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                command(cell.starter, folder),
                env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + _LIMIT
        while not (folder / "mark").exists() and process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
            time.sleep(0.01)
        for number in SIGNALS[cell.signals]:
            process.send_signal(number)
            time.sleep(_BETWEEN_SIGNALS)
        try:
            code = process.wait(_LIMIT)
        except subprocess.TimeoutExpired:
            code = "hang"
        result = {
            **cell._asdict(),
            "code": code if isinstance(code, str) or code >= 0 else 128 - code,
            "steps": _size(folder / "steps"),
            "checkpoint": _newest(folder / "run" / "checkpoints"),
            "left": _end_all(name),
            "log": (folder / "log").read_text(errors="replace")[-3000:],
        }
        return {**result, "wrong": problems(result)}


def problems(result: dict[str, Any]) -> list[str]:
    """Returns the guarantees that a result violates."""
    code, step, is_mpi = result["code"], result["checkpoint"], result["starter"] == "mpirun"
    wrong = []
    if code == "hang":
        wrong.append("does not end")
    if result["left"]:
        wrong.append(f"{result['left']} processes left")
    if (code == 138) and step is None:
        wrong.append("138 without a checkpoint")
    if result["starter"] == "nohup" and result["signals"] == "SIGHUP":
        return wrong + ["ended by an ignored signal"] * (code != 0)
    if is_mpi or result["signals"] == "SIGINT twice":  # mpirun kills its ranks, and so do users
        return wrong
    if result["moment"] == "starting":
        return wrong + ["wrong exit code"] * (code not in (129, 130, 143))
    if code != (130 if result["signals"].startswith("SIGINT") else 138):
        wrong.append("wrong exit code")
    if step != result["steps"]:
        wrong.append(f"saved step {step} of {result['steps']}")
    return wrong


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _newest(folder: Path) -> int | None:
    """Returns the step of the newest checkpoint, after comparing its files with its manifest."""
    from tfdist.checkpoint.store import Store, load

    if not folder.is_dir() or not (places := Store(str(folder)).places()):
        return None
    load(Store(str(folder)).path(places[0]))
    return places[0].step


def _end_all(name: str) -> int:
    """Kills the processes of a run that remain, and returns their number."""
    remaining = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TFDIST_TEST_FOLDER") == name:
                remaining.append(process)
                process.kill()
        except psutil.Error:
            continue
    return len(remaining)


def table(results: list[dict[str, Any]]) -> str:
    """Returns the rows of the page, for the signals whose cells are all measured."""
    by_cell = {(r["signals"], r["moment"], r["starter"]): r for r in results}
    lines = ["| signal | started by | " + " | ".join(MOMENTS) + " |", "| --- " * 7 + "|"]
    for signals in SIGNALS:
        rows = {s: [by_cell.get((signals, m, s)) for m in MOMENTS] for s in _starters(signals)}
        if all(None not in row for row in rows.values()):
            for starter, row in rows.items():
                cells = [_cell(result) for result in row if result]
                lines.append("| " + " | ".join([signals, starter, *cells]) + " |")
    return "\n".join(lines) + "\n"


def _cell(result: dict[str, Any]) -> str:
    step = result["checkpoint"]
    saved = "nothing" if step is None else f"step {step} of {result['steps']}"
    return f"{result['code']}: {saved}"


def main() -> int:
    """Runs all cells, or those that flags select. Returns 1 if one violates a guarantee."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.studies.faults.signals", description=__doc__
    )
    parser.add_argument("--signal", action="append", choices=list(SIGNALS))
    parser.add_argument("--moment", action="append", choices=MOMENTS)
    parser.add_argument("--starter", action="append", choices=STARTERS)
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time (2)")
    parser.add_argument("--results", default="signals.jsonl", help="file to append results to")
    parser.add_argument("--table", action="store_true", help="only write docs/signals.md")
    chosen = parser.parse_args()
    results = Path(chosen.results)
    if chosen.table:
        lines = [json.loads(line) for line in results.read_text().splitlines()]
        head, mark, _ = _PAGE.read_text().partition("<!-- table -->\n")
        _PAGE.write_text(head + mark + table(lines))
        return 0
    lines = results.read_text().splitlines() if results.exists() else []
    done = {tuple(json.loads(line)[name] for name in Cell._fields) for line in lines}
    lock, failed = threading.Lock(), []

    def one(cell: Cell) -> None:
        result = run(cell)
        with lock, results.open("a") as file:
            print(json.dumps(result), file=file, flush=True)
            print(*cell, _cell(result), *result["wrong"], sep=", ", flush=True)
            failed.extend(result["wrong"])

    with ThreadPoolExecutor(chosen.jobs) as pool:
        list(pool.map(one, [cell for cell in _cells(chosen) if cell not in done]))
    return int(bool(failed))


def _cells(chosen: argparse.Namespace) -> Iterator[Cell]:
    for signals in chosen.signal or SIGNALS:
        starters = [one for one in _starters(signals) if one in (chosen.starter or STARTERS)]
        yield from (
            Cell(signals, *rest) for rest in itertools.product(chosen.moment or MOMENTS, starters)
        )


def _starters(signals: str) -> tuple[str, ...]:
    return _STARTERS_OF_TWO if len(SIGNALS[signals]) > 1 else STARTERS


if __name__ == "__main__":
    sys.exit(main())
