"""`tfdist tune lr`: the learning-rate range test. Importing it imports no TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveFloat, PositiveInt

from tfdist.console import tables
from tfdist.errors import ConfigurationError

DESCRIPTION = "runs a learning-rate range test, and recommends a learning rate"
_SMOKE_STEPS = 8


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--from",
        type=PositiveFloat,
        default=1e-6,
        metavar="X",
        dest="low",
        help="first learning rate",
    )
    parser.add_argument(
        "--to", type=PositiveFloat, default=10.0, metavar="X", help="last learning rate"
    )
    parser.add_argument(
        "--steps", type=PositiveInt, default=100, metavar="N", help="number of steps"
    )
    parser.add_argument("--chart", metavar="FILE.png", help="plot the losses to this file")
    parser.add_argument("--table", metavar="FILE", help="write the losses to this .csv or .md file")
    parser.add_argument(
        "--smoke", action="store_true", help="run only a few steps, to check that the command works"
    )


def run(
    low: float,
    to: float,
    steps: int,
    chart: str | None,
    table: str | None,
    smoke: bool,
    training: Sequence[str],
) -> None:
    """Trains with a rising rate and prints a recommendation; the arguments are the flags' values.

    Raises:
        ConfigurationError: The last rate is not larger than the first, or a flag of the training
            command is invalid.
    """
    if low >= to:
        raise ConfigurationError(f"--from {low:g} --to {to:g}: --to must be larger than --from.")
    tables.check_path(chart, ".png")
    tables.check_path(table, ".csv", ".md")
    from tfdist.run import flags

    config = flags.parse("python -m tfdist.train", "", list(training))

    from tfdist.tools.tune import lr_range

    points = lr_range.run(config, low, to, _SMOKE_STEPS if smoke else steps)
    tables.facts(lr_range.recommendation(points).items())
    if table:
        rows = [(f"{rate:.3g}", f"{loss:.5g}", f"{mean:.5g}") for rate, loss, mean in points]
        tables.write_file(Path(table), ("learning rate", "loss", "smoothed"), rows)
    if chart:
        lr_range.draw(points, Path(chart))
