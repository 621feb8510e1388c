"""The trainer's interface to the watchdog: records trainer calls and their progress."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import tensorflow as tf

from tfdist import cluster
from tfdist.cluster.watchdog.heartbeat import Heartbeat, host_addresses
from tfdist.cluster.watchdog.status import State, missed_seconds
from tfdist.cluster.watchdog.verdict import GRACE_SECONDS, SILENCE_SECONDS
from tfdist.errors import ConfigurationError, summary

_heartbeat: Heartbeat | None = None


class Workers(Protocol):
    """The part of a process group that the watchdog uses."""

    size: int
    rank: int

    def broadcast_object(self, value: Any) -> Any:
        """Returns the object of rank 0 on every worker."""


class Watchdog:
    """Terminates a run in which workers would wait forever. Does nothing with one worker.

    Args:
        workers: The trainer's process group; all workers create their watchdogs at the same point.
        seconds: Maximum time without progress of any worker; 0 turns the watchdog off. Workers that
            died or do not respond are detected sooner. Must be the same on every worker.

    Raises:
        ConfigurationError: `seconds` is negative.
    """

    def __init__(self, workers: Workers, seconds: float) -> None:
        if seconds < 0:
            raise ConfigurationError(f"watchdog_seconds={seconds!r}: expected 0 or more.")
        self.seconds = seconds
        self._workers = workers
        self._watched = workers.size > 1 and seconds > 0
        if self._watched:  # not in `fit`, which a failing worker may never reach
            _start_heartbeat(workers)

    def passed(self, place: str) -> None:
        """Records a progress mark, cheaply. All workers pass the same marks in the same order."""
        if self._watched and _heartbeat:
            _heartbeat.status.passed(place)

    @contextmanager
    def watching(self, task: str) -> Iterator[None]:
        """Watches the block, which all workers enter. A nested block has no effect."""
        if not (self._watched and _heartbeat) or _heartbeat.status.is_running:
            yield
            return
        heartbeat = _heartbeat
        heartbeat.status.enter(task, self.seconds)
        heartbeat.send()  # so that a worker that dies right after this is known to be running
        left, error = State.OUTSIDE, ""
        try:
            yield
        except KeyboardInterrupt:
            left = State.INTERRUPTED
            raise
        except BaseException as raised:
            left, error = State.FAILED, summary(raised)
            if any(isinstance(e, tf.errors.OpError) for e in (raised, raised.__cause__)):
                _wait_for_an_explanation(heartbeat, missed_seconds(self._workers.size))
            raise
        finally:
            heartbeat.leave(left, error)


def _start_heartbeat(workers: Workers) -> None:
    """Starts the heartbeat of this process, once. All workers must call it together."""
    global _heartbeat
    if _heartbeat is None:
        hosts, listen_at = host_addresses(cluster.current())
        on_gpus = bool(tf.config.get_visible_devices("GPU"))
        _heartbeat = Heartbeat(
            workers.rank, workers.size, workers.broadcast_object, hosts, on_gpus, listen_at
        )


def _wait_for_an_explanation(heartbeat: Heartbeat, news_seconds: float) -> None:
    """Waits while the failure of another worker may explain an error of this one.

    If it does, a verdict arrives and terminates this process.

    Args:
        heartbeat: Heartbeat of this process.
        news_seconds: Time until rank 0's replies show the failure of another worker.
    """
    began = time.monotonic()
    while (waited := time.monotonic() - began) < SILENCE_SECONDS + GRACE_SECONDS:
        if waited > news_seconds and not heartbeat.may_explain_error():
            return
        time.sleep(0.1)
