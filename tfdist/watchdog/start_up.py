"""Limits how long workers wait for each other before there are heartbeats between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tensorflow as tf

from tfdist.watchdog.deadline import deadline, exit_now
from tfdist.watchdog.verdict import COMPILE_SECONDS

#: More than the limits of TensorFlow and of the roll call (120 s), which raise an error instead.
SECONDS = 150.0
_CHECK_SECONDS = 10.0


@contextmanager
def waiting(rank: int, size: int, silent: Callable[[], list[int]]) -> Iterator[None]:
    """Ends this process if the block, in which all workers meet, takes longer than `SECONDS`.

    On GPUs it may take `COMPILE_SECONDS` while all the others respond: the first exchange compiles
    kernels.

    Args:
        rank: Rank of this process.
        size: Number of workers; a single one waits for nobody.
        silent: Returns the other ranks that do not respond, as far as that can be known.
    """
    if size == 1:
        yield
        return

    finished, began = threading.Event(), time.monotonic()

    def give_up() -> None:
        missing = silent()
        if tf.config.get_visible_devices("GPU"):
            while not missing and time.monotonic() < began + COMPILE_SECONDS:
                if finished.wait(_CHECK_SECONDS):
                    return
                missing = silent()
        named = " and ".join(f"rank {other}" for other in missing[:8]) or "an unknown rank"
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        exit_now(
            f"rank {rank} of {size} waited {time.monotonic() - began:.0f} s in start-up for "
            f"{named}{more}: it was stopped, or the network to it is interrupted."
        )

    with deadline(SECONDS, give_up):
        try:
            yield
        finally:
            finished.set()
