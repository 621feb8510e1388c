"""The flags of `python -m tfdist.bench precision`, and what it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.bench import outputs
from tfdist.config import default_data_dir
from tfdist.plan import network as networks

DESCRIPTION = "speed, memory and accuracy by number format"
_PRECISIONS = ["float32", "mixed_float16", "mixed_bfloat16"]


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    networks.add_arguments(parser, precision=False)
    parser.add_argument(
        "--precisions", nargs="+", choices=networks.choices("precision"), default=_PRECISIONS,
        help="which",
    )  # fmt: skip
    parser.add_argument("--batch", type=PositiveInt, default=32, metavar="N", help="of a step")
    parser.add_argument(
        "--steps", type=PositiveInt, default=5, metavar="N", help="that are timed, of each"
    )
    parser.add_argument(
        "--epochs", type=PositiveInt, default=10, metavar="N",
        help="in which the recipe digits is trained, for the accuracy",
    )  # fmt: skip
    parser.add_argument(
        "--data-dir", default=default_data_dir(), metavar="DIR", help="cache folder for the shards"
    )
    outputs.add_arguments(parser)


def run(
    precisions: Sequence[str],
    batch: int,
    steps: int,
    epochs: int,
    data_dir: str,
    json: str | None,
    table: str | None,
    chart: str | None,
    smoke: bool,
    **network: Any,
) -> None:
    """Measures and prints a table; the arguments are the flags.

    Raises:
        ConfigurationError: A flag that does not fit.
        LaunchError: A training fails.
    """
    output = outputs.Outputs(json, table, chart)
    chosen = networks.tiny() if smoke else networks.from_flags(**network)
    from tfdist.bench.precision import measure, report

    if smoke:
        precisions, batch, steps, epochs = precisions[:2], 4, 2, 1
    results = [
        measure.of(chosen, precision, batch, steps) | measure.accuracy(precision, epochs, data_dir)
        for precision in precisions
    ]
    report.show(results, chosen.model, batch, epochs, output)
    output.conclude("precision", results, report.paint, width=10)
