"""What the trainer uses of the watchdog: it says when it works, and how far it is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import tensorflow as tf

from tfdist import cluster
from tfdist.errors import ConfigurationError
from tfdist.watchdog.heartbeat import Heartbeat, own_hosts
from tfdist.watchdog.report import State
from tfdist.watchdog.verdict import GRACE_SECONDS, SILENCE_SECONDS, may_explain

#: For the news of a worker's end to come, after its end broke an exchange.
_NEWS_SECONDS = 3.0

_heartbeat: Heartbeat | None = None


class Workers(Protocol):
    """A strategy, as far as the watchdog needs one."""

    @property
    def num_workers(self) -> int:
        """Processes that train together."""

    @property
    def rank(self) -> int:
        """This process among them."""

    @property
    def stops_together(self) -> bool:
        """Whether they wait for each other in every step."""

    def broadcast_text(self, text: str) -> str:
        """Returns the text of rank 0, in each of them."""


class Watchdog:
    """Watches that no worker waits for ever for another. With one worker it does nothing.

    Args:
        workers: The trainer's strategy, which all hand to a watchdog at the same place.
        seconds: For which nobody may make a step, however busy; 0: never ends a run. A worker that
            has died or fallen silent is noticed sooner. The same on every worker.

    Attributes:
        seconds: As given; it may be changed between two calls of the trainer.

    Raises:
        ConfigurationError: Negative seconds.
    """

    def __init__(self, workers: Workers, seconds: float) -> None:
        if seconds < 0:
            raise ConfigurationError(f"watchdog_seconds={seconds!r}: expected 0 or more.")
        self.seconds = seconds
        self._watched = workers.stops_together and seconds > 0
        if self._watched:  # not first in fit, to which a worker may never come
            _join(workers)

    def passed(self, place: str) -> None:
        """Passes a place; cheap. All workers pass the same ones, in the same order."""
        if self._watched and _heartbeat:
            _heartbeat.status.passed(place)

    @contextmanager
    def watching(self, task: str) -> Iterator[None]:
        """Watches within the block, which all workers enter. One inside another is part of it."""
        if not (self._watched and _heartbeat) or _heartbeat.status.at_work:
            yield
            return
        heartbeat = _heartbeat
        heartbeat.status.enter(task, self.seconds)
        heartbeat.send()  # who dies in the next moment died at work
        left, error = State.OUTSIDE, ""
        try:
            yield
        except KeyboardInterrupt:
            left = State.INTERRUPTED
            raise
        except BaseException as raised:
            left, error = State.FAILED, _first_line(raised)
            if any(isinstance(e, tf.errors.OpError) for e in (raised, raised.__cause__)):
                _wait_for_an_explanation(heartbeat)
            raise
        finally:
            heartbeat.status.leave(left, error)
            heartbeat.send()


def _join(workers: Workers) -> None:
    """Starts the heartbeat of this process, once; all workers do together."""
    global _heartbeat
    if _heartbeat is None:
        hosts = own_hosts(cluster.current())
        on_gpus = bool(tf.config.get_visible_devices("GPU"))
        _heartbeat = Heartbeat(
            workers.rank, workers.num_workers, workers.broadcast_text, hosts, on_gpus
        )


def _wait_for_an_explanation(heartbeat: Heartbeat) -> None:
    """Waits while another's end may be why an exchange broke; if so the process ends here."""
    began = time.monotonic()
    while (waited := time.monotonic() - began) < SILENCE_SECONDS + GRACE_SECONDS:
        if waited > _NEWS_SECONDS and not may_explain(heartbeat.reports(), heartbeat.status.rank):
            return
        time.sleep(0.1)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
