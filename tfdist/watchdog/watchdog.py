"""What the trainer uses of the watchdog: it says when it works, and how far it is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from tfdist import cluster
from tfdist.errors import ConfigurationError
from tfdist.strategies.base import Strategy
from tfdist.watchdog.heartbeat import Beats, own_hosts
from tfdist.watchdog.verdict import GRACE_SECONDS, SILENCE_SECONDS, State, may_explain

#: For the news of a worker's end to come, after its end broke an exchange.
_NEWS_SECONDS = 3.0

_beats: Beats | None = None


class Watchdog:
    """Watches that no worker waits for ever for another. With one worker it does nothing.

    Args:
        strategy: The trainer's, which all workers hand to a watchdog at the same place.
        seconds: For which nobody may make a step, however busy; 0: never ends a run. A worker that
            has died or fallen silent is noticed sooner. The same on every worker.

    Attributes:
        seconds: As given; it may be changed between two calls of the trainer.

    Raises:
        ConfigurationError: Negative seconds.
    """

    def __init__(self, strategy: Strategy, seconds: float) -> None:
        if seconds < 0:
            raise ConfigurationError(f"watchdog_seconds={seconds!r}: expected 0 or more.")
        self._strategy, self.seconds = strategy, seconds
        self._watched = strategy.stops_together and seconds > 0
        if self._watched:  # not first in fit, to which a worker may never come
            _join(strategy)

    def passed(self, place: str) -> None:
        """Passes a mark; cheap. All workers pass the same ones, in the same order."""
        if self._watched and _beats:
            _beats.pulse.move(place)

    @contextmanager
    def watching(self, task: str) -> Iterator[None]:
        """Watches within the block, which all workers enter. One inside another is part of it."""
        if not (self._watched and _beats) or _beats.pulse.at_work:
            yield
            return
        beats = _beats
        beats.pulse.enter(task, self.seconds)
        beats.tell()  # who dies in the next moment died at work
        left, error = State.OUTSIDE, ""
        try:
            yield
        except KeyboardInterrupt:
            left = State.INTERRUPTED
            raise
        except BaseException as raised:
            left, error = State.FAILED, _first_line(raised)
            if any(isinstance(e, tf.errors.OpError) for e in (raised, raised.__cause__)):
                _wait_for_an_explanation(beats)
            raise
        finally:
            beats.pulse.leave(left, error)
            beats.tell()


def _join(strategy: Strategy) -> None:
    """Makes the beats of this process, once; all workers do together."""
    global _beats
    if _beats is None:
        hosts = own_hosts(cluster.current())
        _beats = Beats(strategy.rank, strategy.num_workers, strategy.broadcast_text, hosts)


def _wait_for_an_explanation(beats: Beats) -> None:
    """Waits while another's end may be why an exchange broke; if so the process ends here."""
    began = time.monotonic()
    while (waited := time.monotonic() - began) < SILENCE_SECONDS + GRACE_SECONDS:
        if waited > _NEWS_SECONDS and not may_explain(beats.rows(), beats.pulse.rank):
            return
        time.sleep(0.1)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
