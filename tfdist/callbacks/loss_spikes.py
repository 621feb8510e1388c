"""Warns or stops when the loss leaves the band of its recent values."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal, get_args

import keras
import numpy as np

from tfdist.callbacks.step_log import RecentLoss
from tfdist.errors import ConfigurationError, LossSpikeError

Logs = Mapping[str, Any] | None
OnSpike = Literal["warn", "stop", "rollback"]

#: The rule: deviations above the mean of the last values, the number of values that it needs, and
#: the number of new ones after which mean and deviation are updated.
_DEVIATIONS, _WINDOW, _FEWEST, _REFRESH = 7.0, 1000, 20, 10


class LossSpikes(keras.callbacks.Callback):
    """Detects a loss that is 7 standard deviations above the mean of the last 1,000 values.

    The values are the mean losses of calls of the inner loop, of one or several steps. The rule is
    that of the spike score in Team OLMo 2025, "2 OLMo 2 Furious", for values above the mean. It
    needs 20 values. A sequence of such values is one spike.

    Example:
        >>> from tfdist.callbacks.loss_spikes import LossSpikes
        >>> trainer = tfdist.Trainer(build_model, devices=2)
        >>> spikes = LossSpikes(trainer.stats, "stop")
        >>> history = trainer.fit(x, y, batch_size=64, callbacks=[spikes], verbose=0)

    Args:
        stats: The trainer's statistics.
        on_spike: `"warn"` prints a line, `"stop"` raises an error, on all workers. So does
            `"rollback"`, after which a run of `tfdist.train` continues without these steps.

    Raises:
        ConfigurationError: `on_spike` is unknown.
        LossSpikeError: The loss left its band, unless `on_spike` is `"warn"`.
    """

    chief_only, only_reads, every_batch = False, True, False  # all workers see the same losses

    def __init__(self, stats: Any, on_spike: OnSpike = "warn") -> None:
        super().__init__()
        if on_spike not in get_args(OnSpike):
            raise ConfigurationError(
                f"on_spike={on_spike!r}: expected one of {', '.join(get_args(OnSpike))}."
            )
        self._stats, self._on_spike = stats, on_spike
        self._values: deque[float] = deque(maxlen=_WINDOW)
        self._recent, self._steps_before, self._last_step = RecentLoss(), 0, 0
        self._mean, self._deviation, self._num_new = math.inf, 0.0, _REFRESH
        self._is_within = False

    def get_state(self) -> dict[str, Any]:
        """Returns the values, and the sums of the epoch."""
        steps = [self._steps_before, self._last_step]
        return {"values": list(self._values), "loss": self._recent.state, "steps": steps}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores the state of a checkpoint."""
        self._values, self._num_new = deque(state["values"], _WINDOW), _REFRESH
        self._recent.state = state["loss"]
        self._steps_before, self._last_step = state["steps"]

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._recent, self._steps_before = RecentLoss(), self._last_step

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        first, self._last_step = self._last_step + 1, self._steps_before + batch + 1
        num_rows = int(self._stats.last_call.result.num_rows)
        if not num_rows:  # steps that a run leaves out
            return
        self._recent.rows += num_rows
        value = self._recent.update(float((logs or {}).get("loss", 0.0)))
        if not math.isfinite(value):  # `on_nan` of the trainer decides
            return
        if self._num_new >= _REFRESH and len(self._values) >= _FEWEST:
            self._num_new = 0
            self._mean, self._deviation = float(np.mean(self._values)), float(np.std(self._values))
        is_spike = value > self._mean + _DEVIATIONS * self._deviation
        self._values.append(value)
        self._num_new += 1
        begins, self._is_within = is_spike and not self._is_within, is_spike
        if not begins:
            return
        message = (
            f"The loss of steps {first} to {self._last_step} is {value:.4g}, but recent values "
            f"have a mean of {self._mean:.4g} and a standard deviation of {self._deviation:.2g}. "
            f"tfdist replay RUN --step {self._last_step} shows the records of that step."
        )
        if self._on_spike != "warn":
            error = LossSpikeError(message)
            error.steps = first, self._last_step
            raise error
        print(f"warning: {message}", file=sys.stderr, flush=True)
