"""The flags of `python -m tfdist.bench start`, and what it does. Imports no TensorFlow at first."""

from __future__ import annotations

from collections.abc import Sequence

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.bench.start.models import MODELS

DESCRIPTION = "processor time and memory of a first fit of one step, beside plain Keras's"


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="what to train"
    )
    parser.add_argument(
        "--replicas",
        nargs="+",
        type=PositiveInt,
        default=[1, 2, 4, 8],
        metavar="N",
        help="1: one device; from 2 on: mirrored",
    )
    parser.add_argument(
        "--rounds", type=PositiveInt, default=1, metavar="N", help="processes of each contender"
    )
    parser.add_argument("--json", metavar="FILE", help="where to write the results")
    parser.add_argument("--smoke", action="store_true", help="the smallest model alone, once")


def run(
    models: Sequence[str], replicas: Sequence[int], rounds: int, json: str | None, smoke: bool
) -> None:
    """Measures and prints a table of each model; the arguments are the flags."""
    from tfdist.bench import document
    from tfdist.bench.machine import OthersLoad
    from tfdist.bench.start import report, rounds_of
    from tfdist.console import tables

    if smoke:
        models, replicas, rounds = ["mlp"], [1, 2], 1
    load, results = OthersLoad(), []
    for model in models:
        results.append(rounds_of.model(model, replicas, rounds))
        report.show(results[-1])
    tables.text(document.conclude("start", results, load.fraction(), json))
