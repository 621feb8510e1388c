"""The flags of `python -m tfdist.bench memory`, and what it does."""

from __future__ import annotations

from typing import Any

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

DESCRIPTION = "what a training holds: whole, in copies, and divided; what it sends"


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--weights",
        type=PositiveInt,
        default=100_000_000,
        metavar="N",
        help="of the network; Adam keeps two more numbers for each",
    )
    parser.add_argument("--layers", type=PositiveInt, default=24, metavar="N", help="of equal size")
    parser.add_argument("--devices", type=PositiveInt, default=2, metavar="N", help="replicas")
    parser.add_argument(
        "--limit",
        type=PositiveInt,
        metavar="MB",
        help="instead: does the network train where each process may take so much (without GPUs: "
        "of its tensors), whole, and cut over --devices processes",
    )
    parser.add_argument("--json", metavar="FILE", help="where to write the results")
    parser.add_argument("--smoke", action="store_true", help="small and short: does it work?")


def run(
    weights: int, layers: int, devices: int, limit: int | None, json: str | None, smoke: bool
) -> None:
    """Measures and prints a table; the arguments are the flags."""
    from tfdist.bench import document
    from tfdist.bench.machine import OthersLoad
    from tfdist.bench.memory import limit as within
    from tfdist.console import tables

    if smoke:
        weights, layers = 100_000, 2
    load = OthersLoad()
    if limit is None:
        results = _held(weights, layers, devices, smoke)
    else:
        results = within.compared(weights, layers, devices, limit)
        within.show(results)
    tables.text(document.conclude("memory", results, load.fraction(), json))


def _held(weights: int, layers: int, devices: int, smoke: bool) -> list[dict[str, Any]]:
    """What all contenders hold."""
    from tfdist.bench.memory import activations, measure, report
    from tfdist.install_horovod import versions

    rows, width = (256, 32) if smoke else (4096, 256)
    results = [
        measure.held(name, weights, layers, devices)
        for name, contender in measure.CONTENDERS.items()
        if not contender.in_processes or versions.horovod() is not None
    ]
    report.show(results)
    again = [activations.held(recompute, rows, width) for recompute in activations.RECOMPUTES]
    activations.show(again)
    return results + again
