"""Bounds how long workers wait for each other before there is a heartbeat between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tfdist.watchdog.deadline import deadline
from tfdist.watchdog.exit import exit_now

#: More than TensorFlow's own bound and the roll call's (120 s), which raise an error instead.
SECONDS = 150.0


@contextmanager
def waiting(rank: int, size: int, silent: Callable[[], list[int]]) -> Iterator[None]:
    """Ends this process where the block, in which all workers meet, takes longer than `SECONDS`.

    Args:
        rank: Of this process.
        size: Number of workers; one waits for nobody.
        silent: Returns those of the others that give no sign of life, as far as that can be known.
    """
    if size == 1:
        yield
        return

    def give_up() -> None:
        named = " and ".join(f"rank {other}" for other in silent()) or "a rank that is not known"
        exit_now(
            f"rank {rank} of {size} waited {SECONDS:.0f} s in start-up for {named}: it was "
            "stopped, or the network to it broke."
        )

    with deadline(SECONDS, give_up):
        yield
