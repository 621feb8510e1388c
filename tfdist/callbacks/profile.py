"""A trace of some steps for TensorBoard, and where the time of the others goes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras
import tensorflow as tf

Logs = Mapping[str, float] | None

#: Calls that tell nothing: the first compiles, and the number of steps of a call follows from the
#: second.
_STARTING_CALLS = 2


class Seconds(NamedTuple):
    """What the calls that were looked at took, added up.

    Attributes:
        steps: Made by them.
        in_calls: Of the devices, and waiting for data.
        waited: Of those, for data.
        around: Of Python: callbacks, and what the workers agree on, up to the next call.
    """

    steps: int = 0
    in_calls: float = 0.0
    waited: float = 0.0
    around: float = 0.0


class Profile(keras.callbacks.Callback):
    """Traces steps once they go at their usual pace, and adds up the time of those after them.

    Args:
        folder: Of TensorBoard's events, where the trace goes to `plugins/profile`.
        stats: A trainer's, with `last_call`.
        num_steps: To trace, at least; the call in which they are reached is traced to its end.

    Attributes:
        seconds: Of the calls that were not traced.
        traced: How many steps were.
    """

    chief_only = only_reads = True
    every_batch = False  # steps are looked at in the calls that they are made in

    def __init__(self, folder: Path, stats: Any, num_steps: int = 10) -> None:
        super().__init__()
        self._folder, self._stats, self._num_steps = folder, stats, num_steps
        self.seconds, self.traced = Seconds(), 0
        self._num_calls, self._began = 0, 0.0
        self._tracing, self._counts = False, False

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        self._add_up()  # the call before this one ends here, unless an epoch did
        self._num_calls += 1
        if self._num_calls > _STARTING_CALLS and not (self.traced or self._tracing):
            tf.profiler.experimental.start(str(self._folder))
            self._tracing = True
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if not self._tracing:
            self._counts = self.traced > 0
            return
        self.traced += int(self._stats.last_call.made.num_steps)
        if self.traced >= self._num_steps:
            self._stop()

    def on_test_begin(self, logs: Logs = None) -> None:
        self.on_epoch_end(0)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._add_up()
        if self._tracing:  # what comes now are no steps
            self._stop()

    def on_train_end(self, logs: Logs = None) -> None:
        self.close()

    def close(self) -> None:
        """Writes the trace, where an error or an interrupt left it open."""
        if self._tracing:
            self._stop()

    def _add_up(self) -> None:
        """Counts the last call in, up to now, unless it has been or tells nothing."""
        if not self._counts:
            return
        self._counts, call, before = False, self._stats.last_call, self.seconds
        around = time.perf_counter() - self._began - call.seconds
        self.seconds = Seconds(
            before.steps + int(call.made.num_steps),
            before.in_calls + call.seconds,
            before.waited + float(call.made.seconds_waited),
            before.around + around,
        )

    def _stop(self) -> None:
        tf.profiler.experimental.stop()
        self._tracing = False
