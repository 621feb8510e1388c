"""`python -m tests.plan.links`: the scaling plan beside real processes over links of known rates.

Two hosts are network namespaces, joined by a wire that `tc` slows down to one rate after another.
What an exchange takes beside its links is measured once, on the wire as it is; what it takes on the
slowed wire is planned from that by `tfdist.plan.scaling`, and measured. It needs root.
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
from typing import Any

import numpy as np

from tests.plan.links_worker import SIZES
from tests.support import ROOT
from tfdist.bench.two_hosts import HOSTS, NotAllowedError, TwoHosts, two_hosts
from tfdist.console import sizes, table_files
from tfdist.plan.scaling.exchange import PAYLOAD, Link, Profile, Wires, ring

RATES = ("1Gb", "400Mb", "200Mb", "100Mb")
_HEADER = ("processes", "link", "what", "planned ms", "measured ms", "ratio")


def main() -> int:
    """Measures, and prints and writes the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.plan.links", description=__doc__)
    parser.add_argument("--per-host", type=int, default=1, help="processes of a host")
    parser.add_argument("--rates", nargs="+", default=list(RATES))
    parser.add_argument("--table", type=Path, help="FILE.md or FILE.csv")
    chosen = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder, two_hosts(Path(folder)) as hosts:
            rows = compare(hosts, chosen.per_host, chosen.rates)
    except NotAllowedError as error:
        print(f"no hosts can be made here: {error}", file=sys.stderr)
        return 1
    for row in [_HEADER, *rows]:
        print("  ".join(f"{cell:>11}" for cell in row))
    if chosen.table:
        table_files.write(chosen.table, _HEADER, rows)
    return 0


def compare(hosts: TwoHosts, per_host: int, rates: Sequence[str]) -> list[list[str]]:
    """Returns a row for each rate and each thing that is measured."""
    num_workers = per_host * len(HOSTS)
    places = [host for host in HOSTS for _ in range(per_host)]
    addresses = ",".join(
        f"{hosts.addresses[host]}:{5000 + rank}" for rank, host in enumerate(places)
    )
    command = [sys.executable, "-m", "tests.plan.links_worker"]
    env = {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    with tempfile.TemporaryFile("w+") as errors:
        workers = [
            hosts.start(
                host, [*command, str(rank), addresses], env,
                stdin=subprocess.PIPE, stderr=errors, cwd=ROOT,
            )
            for rank, host in enumerate(places)
        ]  # fmt: skip
        try:
            free = _ask(workers)
            rows = []
            for rate in rates:
                hosts.slow(sizes.bytes_per_second(rate))
                rows += _rows(num_workers, rate, free, _ask(workers))
        except json.JSONDecodeError:
            errors.seek(0)
            raise SystemExit(errors.read()[-2000:]) from None
    return rows


def _rows(num_workers: int, rate: str, free: Any, slow: Any) -> list[list[str]]:
    """What is planned for a rate, from what was measured without one, beside what was measured."""
    wires = Wires(Link(PAYLOAD * sizes.bytes_per_second(rate), 0.0), Link(1e12, 0.0))

    def moved(num_bytes: float, own: Wires) -> float:
        return ring(num_bytes, num_workers, own)

    each = Wires(Link(1.0, 0.0), Link(1.0, 0.0))
    # A straight line through what sums of each size take: seconds a byte of the software, and a
    # part that is the same for all.
    per_byte, alone = np.polyfit([moved(size, each) for size in SIZES], free["sums"], 1)
    profile = Profile(0.0, 0.0, max(0.0, float(alone)), 1 / max(float(per_byte), 1e-12))
    link = wires.outer._replace(rate=min(wires.outer.rate, profile.exchange_rate))
    limited = wires._replace(outer=link)

    def planned(num_bytes: float) -> float:
        return profile.exchange_seconds + moved(num_bytes, limited)

    found = [
        (f"sum of {sizes.in_words(size)}", planned(size), seconds)
        for size, seconds in zip(SIZES, slow["sums"], strict=True)
    ]
    longer = planned(free["bytes"]) - (
        profile.exchange_seconds + free["bytes"] * moved(1.0, each) / profile.exchange_rate
    )
    found.append(("training step", free["step"] + longer, slow["step"]))
    return [
        [
            str(num_workers),
            rate,
            what,
            f"{1e3 * a:.0f}",
            f"{1e3 * b:.0f}",
            f"{a / b:.2f}",
        ]
        for what, a, b in found
    ]


def _ask(workers: Sequence[subprocess.Popen[str]]) -> Any:
    """Has all measure, and returns what the slowest took."""
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    answers = []
    for worker in workers:
        assert worker.stdout is not None
        answers.append(json.loads(worker.stdout.readline()))
    sums = np.max([answer["sums"] for answer in answers], 0).tolist()
    return answers[0] | {"sums": sums, "step": max(answer["step"] for answer in answers)}


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.exit(main())
