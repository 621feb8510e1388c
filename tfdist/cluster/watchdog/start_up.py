"""Limits how long workers wait for each other before the heartbeats begin."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tensorflow as tf

from tfdist.cluster.watchdog.deadline import deadline, exit_now
from tfdist.cluster.watchdog.verdict import COMPILE_SECONDS

#: More than the time limits of TensorFlow and of the roll call (120 s), which raise an error.
SECONDS = 150.0
_CHECK_SECONDS = 10.0


@contextmanager
def waiting(rank: int, size: int, silent: Callable[[], list[int]]) -> Iterator[None]:
    """Terminates this process if the block, a rendezvous of all workers, exceeds `SECONDS`.

    On GPUs it may take `COMPILE_SECONDS` as long as all other workers respond, because the first
    collective compiles kernels.

    Args:
        rank: Rank of this process.
        size: Number of workers. With one worker, this function does nothing.
        silent: Returns the other ranks that are known not to respond.
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
        ranks = " and ".join(f"rank {other}" for other in missing[:8]) or "an unknown rank"
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        exit_now(
            f"rank {rank} of {size} waited {time.monotonic() - began:.0f} s in start-up for "
            f"{ranks}{more}: it is suspended, or the network to it is interrupted."
        )

    with deadline(SECONDS, give_up):
        try:
            yield
        finally:
            finished.set()
