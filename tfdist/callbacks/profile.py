"""Traces some steps for TensorBoard, and measures the time of the steps after them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras
import tensorflow as tf

Logs = Mapping[str, float] | None

#: Calls that are not representative: the first one compiles, and the second one determines how many
#: steps a call makes.
_WARMUP_CALLS = 2


class Seconds(NamedTuple):
    """Total time of the measured calls, in seconds.

    Attributes:
        steps: Number of steps in these calls.
        in_calls: Time within calls: device computation, and waiting for data.
        waited: The part of `in_calls` that devices waited for data.
        around: Time between calls: Python callbacks, and communication between workers.
    """

    steps: int = 0
    in_calls: float = 0.0
    waited: float = 0.0
    around: float = 0.0


class Profile(keras.callbacks.Callback):
    """Traces steps after a warm-up, and measures the steps after those.

    Example:
        >>> from tfdist.callbacks.profile import Profile
        >>> trainer = tfdist.Trainer(build_model, devices=2, steps_per_call=4)
        >>> profile = Profile(Path("tensorboard"), trainer.stats, num_steps=4)
        >>> history = trainer.fit(x, y, batch_size=64, callbacks=[profile], verbose=0)
        >>> profile.traced
        4

    Args:
        folder: TensorBoard's log directory; the trace is written to `plugins/profile` in it.
        stats: The trainer's statistics, with `last_call`.
        num_steps: Smallest number of steps to trace. Calls are traced as a whole.

    Attributes:
        seconds: Time of the calls after the trace.
        traced: Number of traced steps.
    """

    chief_only = only_reads = True
    every_batch = False  # it measures calls, which may run several steps

    def __init__(self, folder: Path, stats: Any, num_steps: int = 10) -> None:
        super().__init__()
        self._folder, self._stats, self._num_steps = folder, stats, num_steps
        self.seconds, self.traced = Seconds(), 0
        self._num_calls, self._began = 0, 0.0
        self._tracing, self._is_measured = False, False

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        self._measure()  # the previous call, unless the end of an epoch measured it
        self._num_calls += 1
        if self._num_calls > _WARMUP_CALLS and not (self.traced or self._tracing):
            tf.profiler.experimental.start(str(self._folder))
            self._tracing = True
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if not self._tracing:
            self._is_measured = self.traced > 0
            return
        self.traced += int(self._stats.last_call.result.num_steps)
        if self.traced >= self._num_steps:
            self._stop()

    def on_test_begin(self, logs: Logs = None) -> None:
        self.on_epoch_end(0)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._measure()
        if self._tracing:  # no more steps follow
            self._stop()

    def on_train_end(self, logs: Logs = None) -> None:
        self.close()

    def close(self) -> None:
        """Writes the trace if an error or an interrupt left it open."""
        if self._tracing:
            self._stop()

    def _measure(self) -> None:
        """Adds the last call and the time since it to `seconds`, once, if it is to be measured."""
        if not self._is_measured:
            return
        self._is_measured, call, total = False, self._stats.last_call, self.seconds
        around = time.perf_counter() - self._began - call.seconds
        self.seconds = Seconds(
            total.steps + int(call.result.num_steps),
            total.in_calls + call.seconds,
            total.waited + float(call.result.seconds_waited),
            total.around + around,
        )

    def _stop(self) -> None:
        self._tracing = False  # also if the trace cannot be written
        tf.profiler.experimental.stop()
