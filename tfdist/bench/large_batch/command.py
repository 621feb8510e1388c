"""The flags of `python -m tfdist.bench large_batch`, and what it does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveFloat, PositiveInt

from tfdist.bench.large_batch.ways import WAYS
from tfdist.config import default_data_dir

DESCRIPTION = "accuracy on the digits against the batch, with and without scaling and warm-up"
_BATCHES = [32, 64, 128, 256, 512, 1024]


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--batches", nargs="+", type=PositiveInt, default=_BATCHES, metavar="N", help="global ones"
    )
    parser.add_argument(
        "--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="of setting the rate"
    )
    parser.add_argument("--seeds", type=PositiveInt, default=5, metavar="N", help="runs of each")
    parser.add_argument("--epochs", type=PositiveInt, default=30, metavar="N", help="of a run")
    parser.add_argument(
        "--learning-rate", type=PositiveFloat, default=0.05, metavar="X",
        help="for the first of the batches",
    )  # fmt: skip
    parser.add_argument(
        "--data-dir", default=default_data_dir(), metavar="DIR", help="cache folder for the shards"
    )
    parser.add_argument("--json", metavar="FILE", help="where to write all runs")
    parser.add_argument("--table", metavar="FILE.md", help="where to write the table")
    parser.add_argument("--chart", metavar="FILE.png", help="where to draw it")
    parser.add_argument("--smoke", action="store_true", help="few short runs, to see that it works")


def run(
    batches: Sequence[int],
    ways: Sequence[str],
    seeds: int,
    epochs: int,
    learning_rate: float,
    data_dir: str,
    json: str | None,
    table: str | None,
    chart: str | None,
    smoke: bool,
) -> None:
    """Trains, and prints a table; the arguments are the flags."""
    from tfdist.bench import document
    from tfdist.bench.large_batch import experiment, report
    from tfdist.bench.machine import OthersLoad
    from tfdist.console import tables

    if smoke:
        batches, seeds, epochs = [32, 512], 1, 2
    load = OthersLoad()
    plan = experiment.Plan(batches[0], learning_rate, epochs, data_dir)
    results = [
        experiment.trained(plan, way, batch, seed)
        for way in ways
        for batch in batches
        for seed in range(seeds)
    ]
    report.show(results)
    tables.text(report.NOTE)
    tables.text(document.conclude("large_batch", results, load.fraction(), json))
    if table:
        report.write(results, Path(table))
    if chart:
        report.draw(results, Path(chart))
