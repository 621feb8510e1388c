"""The flags of `python -m tfdist.tune lr`, and what it does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveFloat, PositiveInt

from tfdist.console import table_files, tables
from tfdist.errors import ConfigurationError

DESCRIPTION = "the loss while the learning rate rises: where it falls fastest, and where it breaks"
_SMOKE_STEPS = 8


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--from", type=PositiveFloat, default=1e-6, metavar="X", dest="low", help="the first rate"
    )
    parser.add_argument("--to", type=PositiveFloat, default=10.0, metavar="X", help="the last")
    parser.add_argument("--steps", type=PositiveInt, default=100, metavar="N", help="between them")
    parser.add_argument("--chart", metavar="FILE.png", help="where to draw the losses")
    parser.add_argument("--table", metavar="FILE", help="where to write them, .csv or .md")
    parser.add_argument("--smoke", action="store_true", help="few steps, to see that it works")


def run(
    low: float,
    to: float,
    steps: int,
    chart: str | None,
    table: str | None,
    smoke: bool,
    training: Sequence[str],
) -> None:
    """Trains while the rate rises, and prints what to take; the arguments are the flags.

    Raises:
        ConfigurationError: Rates that do not rise, or a flag of the training that does not fit.
    """
    if low >= to:
        raise ConfigurationError(f"--from {low:g} --to {to:g}: expected the second to be larger.")
    table_files.check(chart, ".png")
    table_files.check(table, ".csv", ".md")
    from tfdist.run import flags

    config = flags.parse("python -m tfdist.train", "", list(training))

    from tfdist.tune import range_report, range_test

    found = range_test.run(config, low, to, _SMOKE_STEPS if smoke else steps)
    advice = range_test.advice(found)
    tables.facts(advice.items())
    if table:
        rows = [(f"{rate:.3g}", f"{loss:.5g}", f"{mean:.5g}") for rate, loss, mean in found]
        table_files.write(Path(table), ("learning rate", "loss", "smoothed"), rows)
    if chart:
        range_report.draw(found, Path(chart))
