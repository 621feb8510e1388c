"""Bounds how long workers wait for each other before there is a heartbeat between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tensorflow as tf

from tfdist.watchdog.deadline import deadline
from tfdist.watchdog.exit import exit_now
from tfdist.watchdog.verdict import COMPILE_SECONDS

#: More than TensorFlow's own bound and the roll call's (120 s), which raise an error instead.
SECONDS = 150.0
_CHECK_SECONDS = 10.0


@contextmanager
def waiting(rank: int, size: int, silent: Callable[[], list[int]]) -> Iterator[None]:
    """Ends this process where the block, in which all workers meet, takes longer than `SECONDS`.

    On GPUs it may take `COMPILE_SECONDS`, as long as all the others give signs of life: the first
    exchange compiles kernels.

    Args:
        rank: Of this process.
        size: Number of workers; one waits for nobody.
        silent: Returns those of the others that give no sign of life, as far as that can be known.
    """
    if size == 1:
        yield
        return

    finished, began = threading.Event(), time.monotonic()

    def give_up() -> None:
        if tf.config.get_visible_devices("GPU"):
            while not (missing := silent()) and time.monotonic() < began + COMPILE_SECONDS:
                if finished.wait(_CHECK_SECONDS):
                    return
        else:
            missing = silent()
        named = " and ".join(f"rank {other}" for other in missing) or "a rank that is not known"
        exit_now(
            f"rank {rank} of {size} waited {time.monotonic() - began:.0f} s in start-up for "
            f"{named}: it was stopped, or the network to it broke."
        )

    with deadline(SECONDS, give_up):
        try:
            yield
        finally:
            finished.set()
