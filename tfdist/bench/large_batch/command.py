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
    parser.add_argument("--seeds", type=PositiveInt, default=3, metavar="N", help="runs of each")
    parser.add_argument("--epochs", type=PositiveInt, default=40, metavar="N", help="of a run")
    parser.add_argument(
        "--reference-batch", type=PositiveInt, default=32, metavar="N",
        help="the batch that the learning rate is for",
    )  # fmt: skip
    parser.add_argument(
        "--learning-rate", type=PositiveFloat, default=0.02, metavar="X", help="for that batch"
    )
    parser.add_argument(
        "--data-dir", default=default_data_dir(), metavar="DIR", help="cache folder for the shards"
    )
    parser.add_argument(
        "--add", nargs="+", metavar="FILE", help="runs that --json wrote before, to show besides"
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
    reference_batch: int,
    learning_rate: float,
    data_dir: str,
    add: Sequence[str] | None,
    json: str | None,
    table: str | None,
    chart: str | None,
    smoke: bool,
) -> None:
    """Trains, and prints a table; the arguments are the flags.

    Raises:
        ConfigurationError: There is no such file, or another benchmark wrote it.
    """
    from tfdist.bench import document
    from tfdist.bench.large_batch import experiment, report
    from tfdist.bench.machine import OthersLoad
    from tfdist.console import tables

    if smoke:
        batches, seeds, epochs = [32, 512], 1, 2
    load = OthersLoad()
    plan = experiment.Plan(reference_batch, learning_rate, epochs, data_dir)
    results = [own for path in add or () for own in report.read(Path(path))]
    for way in ways:
        results += experiment.of_way(plan, way, batches, seeds, results)
    report.show(results)
    tables.text(report.NOTE)
    tables.text(document.conclude("large_batch", results, load.fraction(), json))
    if table:
        report.write(results, Path(table))
    if chart:
        report.draw(results, Path(chart))
