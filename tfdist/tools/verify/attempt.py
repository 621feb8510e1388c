"""A trial with a time limit. Imports TensorFlow only when it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tfdist import strategies
from tfdist.cluster.deadline import deadline
from tfdist.errors import TfdistError
from tfdist.tools.verify.results import Verdict


def attempt(
    name: str, devices: int | None, seconds: float, **options: Any
) -> Verdict | TfdistError:
    """Runs a trial, and exits the process if it takes longer than `seconds`.

    Args:
        name: Name of the strategy.
        devices: Devices of this process.
        seconds: Time limit.
        **options: Options of the strategy.

    Returns:
        The verdict, or the error that prevented the trial. The error is returned, not raised, so
        that only one of several workers prints it.
    """
    with _time_limit(seconds, name):
        try:
            strategy = strategies.create(name, devices, **options)
            from tfdist.tools.verify.trial import judge

            return judge(strategy)
        except TfdistError as error:
            return error


@contextmanager
def _time_limit(seconds: float, name: str) -> Iterator[None]:
    """Exits this process if the block takes too long. An exception cannot interrupt collectives.

    Args:
        seconds: Time limit.
        name: Name of the strategy, for the message.
    """

    def give_up() -> None:
        message = (
            f"error: {name} did not finish within {seconds} s. Check that every worker is running "
            "and can reach the others, or increase --timeout."
        )
        print(message, file=sys.stderr, flush=True)
        os._exit(1)

    with deadline(seconds, give_up):
        yield
