"""The flags of `python -m tfdist.bench allreduce`, and what it does."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.bench.allreduce.engines import ENGINES, missing

DESCRIPTION = "bandwidth of sums over two replicas, by engine, beside a memory copy's"

#: Bytes of a tensor: from 1 kB to 256 MB.
SIZES = [10**3, 10**4, 10**5, 10**6, 4 * 10**6, 16 * 10**6, 64 * 10**6, 256 * 10**6]
_SMOKE_SIZES, _SMOKE_ROUNDS = [10**3, 10**5], 2


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--engines", nargs="+", choices=list(ENGINES), help="which; left out: all that there are"
    )
    parser.add_argument(
        "--sizes", nargs="+", type=PositiveInt, default=SIZES, metavar="BYTES", help="of the tensor"
    )
    parser.add_argument(
        "--rounds", type=PositiveInt, default=7, metavar="N", help="measurements of each engine"
    )
    parser.add_argument("--json", metavar="FILE", help="where to write the results")
    parser.add_argument("--chart", metavar="FILE.png", help="where to draw them")
    parser.add_argument(
        "--smoke", action="store_true", help="small tensors and few rounds, to see that it works"
    )


def run(
    engines: Sequence[str] | None,
    sizes: Sequence[int],
    rounds: int,
    json: str | None,
    chart: str | None,
    smoke: bool,
) -> None:
    """Measures and prints a table; the arguments are the flags.

    Raises:
        LaunchError: An engine that is installed does not start.
    """
    from tfdist.bench import document
    from tfdist.bench.allreduce import measure, report
    from tfdist.bench.machine import OthersLoad
    from tfdist.console import tables

    asked = list(engines or ENGINES)
    absent = {name: why for name in asked if (why := missing(name))}
    with contextlib.ExitStack() as stack:
        pools = {name: stack.enter_context(ENGINES[name]()) for name in asked if name not in absent}
        load = OthersLoad()
        results = [
            measure.size(pools, num_bytes, _SMOKE_ROUNDS if smoke else rounds)
            for num_bytes in (_SMOKE_SIZES if smoke else sizes)
        ]
        others = load.fraction()
    report.show(results, absent)
    tables.text(document.conclude("allreduce", results, others, json))
    if chart:
        report.draw(results, Path(chart))
