"""`python -m tests.studies.plan_links`: compares the scaling plan with processes over slow links.

Hosts are network namespaces with a process each, whose links `tc` slows down to one rate after
another. The overhead of the software is measured once, on unlimited links; compute time is measured
beside each step, by as many processes that exchange nothing. From these,
`tfdist.tools.plan.scaling` predicts the time of sums and steps over slow links, which are then
measured. It needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.hosts import Hosts, NotAllowedError, make_hosts
from tests.studies.plan_links_worker import SIZES
from tests.support import ROOT
from tfdist.console import tables, units
from tfdist.tools.plan.exchange import PAYLOAD, Link, Profile, Wires, ring, step

PROCESSES = (2, 3, 4)
RATES = ("1Gb", "400Mb", "100Mb")
_HEADER = ("processes", "link", "what", "planned ms", "measured ms", "ratio")
_FREE = Link(1e12, 0.0)


def main() -> int:
    """Measures, and prints and writes the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.studies.plan_links", description=__doc__)
    parser.add_argument("--processes", nargs="+", type=int, default=list(PROCESSES))
    parser.add_argument("--rates", nargs="+", default=list(RATES))
    parser.add_argument("--table", type=Path, help="FILE.md or FILE.csv")
    chosen = parser.parse_args()
    rows: list[list[str]] = []
    try:
        for number in chosen.processes:
            with tempfile.TemporaryDirectory() as folder, make_hosts(Path(folder), number) as hosts:
                rows += compare(hosts, chosen.rates)
    except NotAllowedError as error:
        print(f"cannot create hosts here: {error}", file=sys.stderr)
        return 1
    for row in [_HEADER, *rows]:
        print("  ".join(f"{cell:>11}" for cell in row))
    if chosen.table:
        tables.write_file(chosen.table, _HEADER, rows)
    return 0


def compare(hosts: Hosts, rates: Sequence[str]) -> list[list[str]]:
    """Returns a row for each rate and measurement, with a process on each host."""
    addresses = ",".join(f"{a}:{5000 + i}" for i, a in enumerate(hosts.addresses.values()))
    command = [sys.executable, "-m", "tests.studies.plan_links_worker"]
    env = {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    with tempfile.TemporaryFile("w+") as errors:
        workers = [
            hosts.start(
                host, [*command, str(rank), addresses], env,
                stdin=subprocess.PIPE, stderr=errors, cwd=ROOT,
            )
            for rank, host in enumerate(hosts.addresses)
        ]  # fmt: skip
        try:
            free = _ask(workers)
            profile = _profile(len(workers), free)
            alone = _Plan(len(workers), profile, _FREE).seconds(free["compute"], free["bytes"])
            adds = max(0.0, free["step"] - alone)
            rows = []
            for rate in rates:
                hosts.network.slow(units.bytes_per_second(rate))
                link = Link(PAYLOAD * units.bytes_per_second(rate), 0.0)
                plan = _Plan(len(workers), profile, link)
                rows += _rows(rate, plan, adds, _ask(workers))
        except json.JSONDecodeError:
            errors.seek(0)
            raise SystemExit(errors.read()[-2000:]) from None
    return rows


def _profile(num_workers: int, free: Any) -> Profile:
    """Returns the overhead of exchanges, from measurements on unlimited links."""
    moved = [ring(size, num_workers, Wires(Link(1.0, 0.0), _FREE)) for size in SIZES]
    # A straight line through the times, with equal relative errors: seconds per byte of the
    # software, and a constant.
    per_byte, alone = np.polyfit(moved, free["sums"], 1, w=1 / np.array(free["sums"]))
    rate = 1 / max(float(per_byte), 1e-12)
    return Profile(0.0, free["bytes"], max(0.0, float(alone)), rate)


class _Plan(NamedTuple):
    """Returns the prediction for a number of workers and a rate."""

    num_workers: int
    profile: Profile
    link: Link

    def seconds(self, computing: float, num_bytes: float) -> float:
        """Returns the time of a step that computes, and then sums `num_bytes`."""
        whole = self.profile._replace(seconds=computing, gradient_bytes=num_bytes)
        result = step("ring", whole, self.num_workers, Wires(self.link, _FREE))
        assert result is not None
        return result.seconds


def _rows(rate: str, plan: _Plan, adds: float, slow: Any) -> list[list[str]]:
    """Returns predictions and measurements for a rate; `adds`: a step's own overhead."""
    results = [
        (f"sum of {units.format_bytes(size)}", plan.seconds(0.0, size), seconds)
        for size, seconds in zip(SIZES, slow["sums"], strict=True)
    ]
    whole = plan.seconds(slow["compute"] + adds, plan.profile.gradient_bytes)
    results.append(("training step", whole, slow["step"]))
    return [
        [str(plan.num_workers), rate, what, f"{1e3 * a:.0f}", f"{1e3 * b:.0f}", f"{a / b:.2f}"]
        for what, a, b in results
    ]


def _ask(workers: Sequence[subprocess.Popen[str]]) -> Any:
    """Sends a request to all workers, and returns the slowest worker's times."""
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    answers = []
    for worker in workers:
        assert worker.stdout is not None
        answers.append(json.loads(worker.stdout.readline()))
    sums = np.max([answer["sums"] for answer in answers], 0).tolist()
    slowest = {key: max(answer[key] for answer in answers) for key in ("compute", "step")}
    return answers[0] | slowest | {"sums": sums}


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.exit(main())
