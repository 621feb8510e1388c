"""A trial in a process of its own, in bounded time. Imports TensorFlow only then."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tfdist import strategies
from tfdist.errors import TfdistError
from tfdist.verify.verdict import Verdict
from tfdist.watchdog.deadline import deadline


def attempt(
    name: str, devices: int | None, seconds: float, **options: Any
) -> Verdict | TfdistError:
    """Makes a trial, or ends the process after so many seconds.

    Args:
        name: Of a strategy.
        devices: Of this process.
        seconds: That it may take.
        **options: Of the strategy.

    Returns:
        The verdict; or what stood in its way, which several workers shall not all print.
    """
    with _within(seconds, name):
        try:
            strategy = strategies.create(name, devices, **options)
            from tfdist.verify.trial import judge

            return judge(strategy)
        except TfdistError as error:
            return error


@contextmanager
def _within(seconds: float, name: str) -> Iterator[None]:
    """Ends this process where the block takes longer: no exception ends a wait for other workers.

    Args:
        seconds: How long it may take.
        name: Of what is tried, for the message.
    """

    def give_up() -> None:
        message = (
            f"error: {name} gave no answer within {seconds} s: see that every worker runs and "
            "reaches the others, or give more --timeout."
        )
        print(message, file=sys.stderr, flush=True)
        os._exit(1)

    with deadline(seconds, give_up):
        yield
