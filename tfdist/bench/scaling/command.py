"""The flags of `python -m tfdist.bench scaling`, and what it does."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.bench.allreduce.engines import missing
from tfdist.bench.scaling.engines import ENGINES, MODELS
from tfdist.errors import ConfigurationError, DeviceError

DESCRIPTION = "two processes of one core each against one, by engine"
_SMOKE_ROUNDS = 2


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="what to train"
    )
    parser.add_argument(
        "--engines", nargs="+", choices=list(ENGINES), help="which; left out: all that there are"
    )
    parser.add_argument(
        "--rounds", type=PositiveInt, default=7, metavar="N", help="measurements of each"
    )
    parser.add_argument(
        "--link",
        nargs="+",
        metavar="RATE[,DELAY]",
        help="instead: steps between two hosts made of network namespaces, as root, over one link "
        "after the other, such as 1Gb or 1Gb,0.1ms",
    )
    parser.add_argument("--json", metavar="FILE", help="where to write the results")
    parser.add_argument("--chart", metavar="FILE.png", help="where to draw them")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny models and few rounds, to see that it works"
    )


def run(
    models: Sequence[str],
    engines: Sequence[str] | None,
    rounds: int,
    json: str | None,
    chart: str | None,
    smoke: bool,
    link: Sequence[str] | None = None,
) -> None:
    """Measures and prints tables; the arguments are the flags.

    Raises:
        DeviceError: There is but one core, or no such link can be made.
        LaunchError: An engine that is installed does not start.
    """
    from tfdist.bench import document
    from tfdist.bench.machine import OthersLoad
    from tfdist.bench.scaling import measure, report
    from tfdist.console import tables

    if len(os.sched_getaffinity(0)) < 2:
        raise DeviceError("two processes of one core each need two cores, but there is one.")
    if link is not None:
        if chart:
            raise ConfigurationError("--chart: there is none of --link; leave one of them out.")
        _over_link(link, engines, _SMOKE_ROUNDS if smoke else rounds, json, smoke)
        return
    asked = list(engines or ENGINES)
    absent = {name: why for name in asked if (why := missing(name))}
    results = []
    with contextlib.ExitStack() as stack:
        pools = {
            name: stack.enter_context(ENGINES[name].start(smoke))
            for name in asked
            if name not in absent
        }
        load = OthersLoad()
        for name in models:
            workload = MODELS[name].tiny() if smoke else MODELS[name]
            turns = _SMOKE_ROUNDS if smoke else rounds
            results.append(measure.model(name, workload, pools, turns))
            report.show(results[-1])
        others = load.fraction()
    for name, why in absent.items():
        tables.text(f"{name} is left out: {why}.")
    tables.text(report.NOTE)
    tables.text(document.conclude("scaling", results, others, json))
    if chart:
        report.draw(results, Path(chart))


def _over_link(
    links: Sequence[str], engines: Sequence[str] | None, rounds: int, json: str | None, smoke: bool
) -> None:
    """Measures steps between two hosts, and prints a table.

    Raises:
        ConfigurationError: An engine that does not join hosts.
    """
    from tfdist.bench import document
    from tfdist.bench.machine import OthersLoad
    from tfdist.bench.scaling import over_link, report
    from tfdist.console import tables

    if others := set(engines or ()) - set(over_link.ENGINES):
        raise ConfigurationError(
            f"--link: {', '.join(sorted(others))} is not measured between hosts: expected "
            f"{' or '.join(over_link.ENGINES)}."
        )
    asked = list(engines or over_link.ENGINES)
    absent = {name: why for name in asked if (why := missing(name))}
    load = OthersLoad()
    there = [name for name in asked if name not in absent]
    results = over_link.measured(links, there, rounds, smoke)
    others_load = load.fraction()
    report.show_link(results)
    for name, why in absent.items():
        tables.text(f"{name} is left out: {why}.")
    tables.text(document.conclude("scaling over a link", results, others_load, json))
