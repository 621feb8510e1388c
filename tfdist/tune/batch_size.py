"""The flags of `python -m tfdist.tune batch-size`, and what it does."""

from __future__ import annotations

from collections.abc import Sequence

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.console import tables
from tfdist.errors import LaunchError
from tfdist.tune import search
from tfdist.tune.probe import Outcome, probe

DESCRIPTION = "the largest global batch for which memory suffices, by a process for each try"


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--from", type=PositiveInt, default=8, metavar="N", dest="first", help="the first try"
    )
    parser.add_argument(
        "--most", type=PositiveInt, default=1 << 16, metavar="N", help="no try is larger"
    )
    parser.add_argument(
        "--memory", type=PositiveInt, metavar="MB",
        help="limit of a GPU, or without GPUs of the process; left out: what there is",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=PositiveInt, default=3, metavar="N", help="of a try; more than one"
    )
    parser.add_argument(
        "--seconds", type=PositiveInt, default=600, metavar="N", help="that a try may take"
    )


def run(
    first: int, most: int, memory: int | None, steps: int, seconds: int, training: Sequence[str]
) -> None:
    """Tries and prints what came of it; the arguments are the flags.

    Raises:
        LaunchError: The training fails with the first batch already, or for another reason.
    """
    tried: list[tuple[int, Outcome]] = []

    def fits(batch: int) -> bool:
        outcome = probe(batch, training, memory, steps, seconds)
        tried.append((batch, outcome))
        tables.text(f"batch {batch}: {outcome.words}")
        if not outcome.fits and not outcome.is_memory and batch == first:
            raise LaunchError(f"the training fails with a batch of {batch}: {outcome.words}")
        return outcome.fits

    found = search.largest(fits, first, most)
    if found == 0:
        raise LaunchError(
            f"not even a batch of {first} fits: try --from 1, or plan with python -m tfdist.plan "
            "memory what would."
        )
    others = [words for batch, (ok, is_memory, words) in tried if not ok and not is_memory]
    tables.facts(
        [
            ("largest batch that ran", str(found)),
            ("take, with a margin of 10 %", f"--batch-size {search.with_margin(found)}"),
            *[("stopped by something else", words) for words in others[:1]],
        ]
    )
