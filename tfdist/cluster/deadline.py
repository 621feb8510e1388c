"""Terminates a process that waits too long for other workers, with a specific exit code.

`waiting` limits the time before the heartbeats of the watchdog begin. A file for each waiting
worker shows the launcher that others wait for one that has ended, before this time has passed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from tfdist.errors import PEER_LOST

#: More than the time limits of TensorFlow and of the roll call (120 s), which raise an error.
SECONDS = 150.0
_CHECK_SECONDS = 10.0
#: Maximum time for the first steps of a task on GPUs. TensorFlow's wheel has no machine code for
#: newer GPUs: the driver compiles every kernel, which can take 30 minutes according to TensorFlow.
COMPILE_SECONDS = 3600.0
_seconds_waited = 0.0


def seconds_waited() -> float:
    """Returns how long this process has waited for others to start, in seconds."""
    return _seconds_waited


@contextmanager
def counted() -> Iterator[None]:
    """Counts the block as waiting for other processes to start."""
    global _seconds_waited
    began = time.monotonic()
    try:
        yield
    finally:
        _seconds_waited += time.monotonic() - began


@contextmanager
def deadline(seconds: float, give_up: Callable[[], object]) -> Iterator[None]:
    """Calls a function in another thread if the block takes longer than a time limit.

    Args:
        seconds: Time limit of the block.
        give_up: Called after the time limit; reports the reason and terminates this process.
    """
    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def exit_now(reason: str) -> NoReturn:
    """Prints the reason and the stacks of all threads, and terminates this process.

    It exits without any cleanup, because cleanup could also wait for the other workers.
    """
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        print(
            f"error: {reason}\nThis process exits with code {PEER_LOST}. Stacks of its threads:",
            file=sys.stderr,
            flush=True,
        )
        # File descriptor 2, because sys.stderr has no file descriptor in a notebook.
        faulthandler.dump_traceback(2)
    os._exit(PEER_LOST)


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

    import tensorflow as tf

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

    with deadline(SECONDS, give_up), counted():
        try:
            yield
        finally:
            finished.set()


#: The variable with the path of the folder. Only workers of a launcher have it.
WAITING_FOLDER = "TFDIST_WAITING"


@contextlib.contextmanager
def shown_as_waiting(rank: int) -> Iterator[None]:
    """Shows that a worker waits for the others within the block."""
    files = [Path(folder) / str(rank)] if (folder := os.environ.get(WAITING_FOLDER)) else []
    for file in files:
        with contextlib.suppress(OSError):  # the launcher has ended, or the disk is full
            file.touch()
    try:
        with counted():
            yield
    finally:
        for file in files:
            with contextlib.suppress(OSError):
                file.unlink()


def waiting_ranks(folder: str) -> set[str]:
    """Returns the ranks of the waiting workers; empty without a folder."""
    return {file.name for file in Path(folder).iterdir()} if folder else set()
