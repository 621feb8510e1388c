"""`--smoke` of every recipe under every strategy: process time, memory and outcome of each run.

    python -m tests.studies.recipes                                    # all: more than an hour
    python -m tests.studies.recipes gpt_text --strategy mirrored horovod

Strategies of several processes run on two workers. Seconds are the process time (user and system)
of all processes, which other programs on the machine change little; memory is the largest sum of
their resident sets. A run that a recipe or strategy refuses shows the refusal.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time

import psutil

from tests.support.starting import ENVIRON
from tfdist.console import tables
from tfdist.run import recipe

STRATEGIES = (
    "one_device", "mirrored", "towers", "central_storage", "pipeline", "tensor_parallel",
    "sharded", "parameter_server", "horovod", "multi_worker",
)  # fmt: skip
_OVER_PROCESSES = ("horovod", "multi_worker")
_LAUNCH = ["-m", "tfdist.launch", "--num-workers", "2"]
_MOST_SECONDS, _MOST_GIGABYTES = 90.0, 4.0  # of process time: 60 s on two cores
_NAMED = "reduced by --smoke"  # in the start-up table
_TIMEOUT = 3600.0  # on a busy machine
_HEADER = ("strategy", "recipe", "outcome", "process s", "GB")


def main() -> int:
    """Runs what the flags say; returns 1 if a run failed, took too long or too much memory."""
    chosen = _flags()
    results = [_row(name, strategy) for name in chosen.recipes for strategy in chosen.strategy]
    tables.numbers(_HEADER, results, num_names=3, title="all runs")
    ended = [row for row in results if row[2] == "ended"]
    worst = [
        (strategy, str(len(rows)), *(max((row[i] for row in rows), key=float) for i in (3, 4)))
        for strategy in chosen.strategy
        if (rows := [row for row in ended if row[0] == strategy])
    ]
    tables.numbers(("strategy", "ended", "most process s", "most GB"), worst, title="worst")
    return int(any(not row[2].startswith(("ended", "refused")) for row in results))


def _row(name: str, strategy: str) -> tuple[str, str, str, str, str]:
    """Trains a recipe with `--smoke` in processes of its own, and prints and returns its row."""
    start = _LAUNCH if strategy in _OVER_PROCESSES else ["-m", "tfdist.train"]
    devices = [] if strategy in (*_OVER_PROCESSES, "one_device") else ["--devices=2"]
    flags = [f"--recipe={name}", f"--strategy={strategy}", *devices, "--data=synthetic", "--smoke"]
    before, most = _seconds(), 0
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, *start, *flags], cwd=folder, env=ENVIRON,
            stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        end = time.monotonic() + _TIMEOUT
        while process.poll() is None and time.monotonic() < end:
            most = max(most, _memory(process.pid))
            time.sleep(0.2)
        if process.returncode is None:
            for member in psutil.Process(process.pid).children(recursive=True):
                member.kill()
            process.kill()
        process.wait()
        output.seek(0)
        text = output.read()
    seconds, gigabytes = _seconds() - before, most / 1e9
    outcome = _outcome(process.returncode, text, seconds, gigabytes)
    row = (strategy, name, outcome, f"{seconds:.0f}", f"{gigabytes:.2f}")
    print(*row, sep="\t", flush=True)
    return row


def _outcome(code: int, text: str, seconds: float, gigabytes: float) -> str:
    if code < 0:
        return f"killed by signal {-code}, or after {_TIMEOUT:.0f} s"
    if code:
        last = [line for line in text.splitlines() if line.strip()][-1]
        refused = "error: " in last and "strategy" in last
        return f"{'refused' if refused else f'exit {code}'}: {last}"
    if _NAMED not in text:
        return "DOES NOT NAME WHAT IS SMALLER"
    return "ended" if seconds <= _MOST_SECONDS and gigabytes <= _MOST_GIGABYTES else "TOO LARGE"


def _memory(pid: int) -> int:
    """Returns the bytes in memory of a process and all that it started."""
    total = 0
    try:
        for member in [*(process := psutil.Process(pid)).children(recursive=True), process]:
            total += member.memory_info().rss
    except psutil.Error:  # one has just ended
        pass
    return total


def _seconds() -> float:
    """Returns the process time of all child processes that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.studies.recipes")
    parser.add_argument("recipes", nargs="*", default=recipe.names(), metavar="RECIPE")
    parser.add_argument("--strategy", nargs="+", default=STRATEGIES, choices=STRATEGIES)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
