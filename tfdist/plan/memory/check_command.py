"""The flags of `python -m tfdist.plan memory-check`, and what it does."""

from __future__ import annotations

from collections.abc import Sequence

from jsonargparse import ArgumentParser

from tfdist.console import table_files
from tfdist.plan import flags
from tfdist.plan.memory import over_flags
from tfdist.plan.memory.check import NETWORKS

DESCRIPTION = "planned memory beside that of real training steps on this machine"
_PRECISIONS = ["float32", "mixed_bfloat16", "mixed_float16"]


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--models", nargs="+", choices=list(NETWORKS), default=list(NETWORKS), help="which networks"
    )
    parser.add_argument(
        "--optimizers", nargs="+", choices=flags.words_of("optimizer"), default=["adam", "sgd"],
        help="which",
    )  # fmt: skip
    parser.add_argument(
        "--precisions", nargs="+", choices=flags.words_of("precision"), default=_PRECISIONS,
        help="which",
    )  # fmt: skip
    parser.add_argument(
        "--strategies", nargs="+", choices=["one_device", *over_flags.OVER],
        default=["one_device"], help="which, over two devices",
    )  # fmt: skip
    parser.add_argument(
        "--results", metavar="FILE.csv",
        help="keeps what is measured at once; what it holds already is not measured again",
    )  # fmt: skip
    parser.add_argument("--table", metavar="FILE.md", help="where to write all of it as a page's")
    parser.add_argument("--smoke", action="store_true", help="one small training, to see it work")


def run(
    models: Sequence[str],
    optimizers: Sequence[str],
    precisions: Sequence[str],
    strategies: Sequence[str],
    results: str | None,
    table: str | None,
    smoke: bool,
) -> None:
    """Plans, trains and prints a table; the arguments are the flags.

    Raises:
        ConfigurationError: A file that cannot be.
        LaunchError: A training failed.
    """
    table_files.check(results, ".csv")
    table_files.check(table, ".md")
    over = over_flags.chosen(strategies)

    from tfdist.plan.memory import check, over_devices

    if smoke:
        models, optimizers, precisions = ["mlp"], ["sgd"], ["float32"]
    if over:
        over_devices.make_devices(2)
    ways = [name for name in strategies if name == "one_device"] + list(over)
    check.run(
        [(m, o, p, s) for m in models for p in precisions for o in optimizers for s in ways],
        results, table,
    )  # fmt: skip
