"""Observers of a pass over the data: callbacks, replicas, watchdog, rates, and the loss."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, get_args

import keras
import numpy as np
import tensorflow as tf

from tfdist.cluster.watchdog.watchdog import Watchdog
from tfdist.devices import GpuUse, gpu_use
from tfdist.errors import ConfigurationError, DataError, NonFiniteError
from tfdist.loops.data_handler import uneven_message
from tfdist.loops.epoch import Call, Epoch, Observer
from tfdist.loops.functions import CompiledFunctions, Loop
from tfdist.strategies.base import Strategy
from tfdist.strategies.inner_loop import LoopResult
from tfdist.strategies.variables import ReplicaSync

#: The attribute of a model by which a callback stops a loop.
STOP: dict[Loop, str] = {
    "train": "stop_training",
    "test": "stop_evaluating",
    "predict": "stop_predicting",
}

#: Warn once and continue; raise an error; or save the state to a separate folder and raise.
OnNan = Literal["warn", "stop", "checkpoint"]

#: The folder of the states that `"checkpoint"` saves, in that of the checkpoints.
FOLDER = "non-finite"


@dataclass(frozen=True)
class RunContext:
    """What the loops and observers of one trainer share."""

    model: keras.Model
    strategy: Strategy
    functions: CompiledFunctions
    watchdog: Watchdog


class KerasCallbacks(Observer):
    """Notifies Keras callbacks of each call as one batch, its last one. They may stop the loop."""

    def __init__(
        self,
        run: RunContext,
        loop: Loop,
        callbacks: keras.callbacks.CallbackList,
        watching: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._begin = getattr(callbacks, f"on_{loop}_batch_begin")
        self._end = getattr(callbacks, f"on_{loop}_batch_end")
        self._model, self._stop, self._watching = run.model, STOP[loop], watching

    def begin_call(self, step: int) -> None:
        with self._watching():
            self._begin(step)

    def end_call(self, call: Call) -> None:
        with self._watching():
            self._end(call.last_step, call.logs)

    def wants_to_stop(self) -> bool:
        return getattr(self._model, self._stop)


class CopySync(Observer):
    """Re-synchronizes the replicas after user code, callbacks included, changed the model.

    Args:
        run: What the observers share.
        after_batches: Whether to synchronize before each call, and not only before the first.
    """

    def __init__(self, run: RunContext, after_batches: bool) -> None:
        self._functions, self._after_batches = run.functions, after_batches

    def begin_epoch(self, epoch: Epoch) -> None:
        self._frequent: ReplicaSync | None = None
        self._calls = 0

    def watching(self) -> AbstractContextManager[None]:
        """Returns a context that records which variables the callbacks of a batch change."""
        return nullcontext() if self._frequent is None else self._frequent.watching()

    def begin_call(self, step: int) -> None:
        if self._frequent is not None:
            self._frequent.sync_changed()
        elif self._calls == 0 or self._after_batches:
            # Also after the first call, whose callbacks ran before anything was recorded.
            self._functions.sync_copies()
            if self._calls:
                self._frequent = self._functions.frequent_sync()
        self._calls += 1


class WatchdogMark(Observer):
    """Reports the progress of every call to the watchdog."""

    def __init__(self, run: RunContext, suffix: str = "") -> None:
        self._watchdog, self._suffix = run.watchdog, suffix

    def begin_epoch(self, epoch: Epoch) -> None:
        self._name = epoch.name

    def end_call(self, call: Call) -> None:
        self._watchdog.passed(f"step {call.last_step + 1} of {self._name}{self._suffix}")


class Throughput(Observer):
    """Throughput of the current epoch, for progress bars and logs.

    The first call compiles the step, and is not included in rates and times.

    Attributes:
        examples_per_second: Rows of global batches per second.
        seconds_per_step: Duration of a step.
        data_wait_share: Fraction of the time, 0 to 1, that devices waited for data.
        gpu_use: Mean fraction of the time, 0 to 1, that GPUs computed, and the bytes in use of the
            fullest one; None if NVML does not tell.
        steps_of_epoch: Steps of this epoch so far.
        rows_of_epoch: Rows of their global batches.
        last_call: The last call; None before the first.
    """

    def __init__(self) -> None:
        self.examples_per_second = self.seconds_per_step = self.data_wait_share = 0.0
        self.last_call: Call | None = None
        self.gpu_use: GpuUse | None = None
        self._compiled, self._looked_at = False, 0.0
        self._begin()

    def begin_epoch(self, epoch: Epoch) -> None:
        self._begin()

    def _begin(self) -> None:
        self.steps_of_epoch, self.rows_of_epoch = 0, 0
        self._seconds, self._rows, self._waited, self._steps = 0.0, 0, 0.0, 0
        self._busy: list[float] = []

    def end_call(self, call: Call) -> None:
        self.last_call = call
        if not call.result.num_rows:  # steps that are left out
            return
        # At most once a second, which is the interval of NVML's own means.
        now = time.monotonic()
        if now - self._looked_at >= 1:
            self._looked_at = now
            if uses := gpu_use():
                self._busy += [one.busy for one in uses]
                mean = sum(self._busy) / len(self._busy)
                self.gpu_use = GpuUse(mean, max(one.memory for one in uses))
        self.steps_of_epoch += int(call.result.num_steps)
        self.rows_of_epoch += int(call.result.num_rows)
        if not self._compiled:
            self._compiled = True
            return
        self._seconds += call.seconds
        self._rows += int(call.result.num_rows)
        self._waited += float(call.result.seconds_waited)
        self._steps += int(call.result.num_steps)
        self.seconds_per_step = self._seconds / max(self._steps, 1)
        self.examples_per_second = self._rows / max(self._seconds, 1e-9)
        self.data_wait_share = min(1.0, self._waited / max(self._seconds, 1e-9))


class NonFiniteLoss(Observer):
    """Checks the loss after every call of the inner loop, when it is on the host anyway.

    A non-finite loss in the first call is always an error.

    Raises:
        ConfigurationError: `on_nan` is unknown.
    """

    def __init__(self, run: RunContext, on_nan: OnNan) -> None:
        if on_nan not in get_args(OnNan):
            raise ConfigurationError(
                f"on_nan={on_nan!r}: expected one of {', '.join(get_args(OnNan))}."
            )
        self._model, self._on_nan = run.model, on_nan
        self._is_first_call, self._has_warned = True, False
        self._skipped_steps = 0.0  # at the last finite loss

    def begin_epoch(self, epoch: Epoch) -> None:
        self._epoch = epoch

    def end_call(self, call: Call) -> None:
        is_first, self._is_first_call = self._is_first_call, False
        loss = call.logs.get("loss", 0.0)
        skipped = call.logs.get("skipped_steps", 0.0)
        if math.isfinite(loss):
            self._skipped_steps, self._has_warned = skipped, False
            return
        # A skipped step of loss scaling changes the epoch's mean loss, but not the weights.
        if self._model.stop_training or skipped > self._skipped_steps:
            return
        if is_first:
            leaves = tf.nest.flatten(self._epoch.data.first_batch(), expand_composites=True)
            arrays = [np.asarray(leaf) for leaf in leaves]
            bad = sum(int(np.sum(~np.isfinite(a))) for a in arrays if a.dtype.kind == "f")
            cause = f"The loss of the first batch is {loss}. " + (
                f"{bad} values of a batch are NaN or infinite: clean the data."
                if bad
                else "The values of the first batch without shuffling are finite. Lower the "
                "learning rate, check the loss, or look for NaN in the data."
            )
            raise NonFiniteError(cause)
        if self._has_warned:
            return
        self._has_warned = True
        names = [name for name, value in call.logs.items() if not math.isfinite(value)]
        last, num_steps = call.last_step + 1, max(1, int(call.result.num_steps))
        steps = f"step {last}" if num_steps == 1 else f"steps {last - num_steps + 1} to {last}"
        weights = "All weights are still finite."
        if weight := _first_non_finite(self._model):
            weights = f"The first weight that is not finite is {weight!r}."
        message = (
            f"{', '.join(names)} became {call.logs['loss']} in {steps} of {self._epoch.name}. "
            f"{weights} Lower the learning rate, clip gradients (clipnorm), or look for NaN in the "
            "data."
        )
        if self._on_nan == "warn":
            warnings.warn(message, stacklevel=2)
            return
        if self._epoch.save_aside and self._on_nan == "checkpoint":
            message += f" The state was saved to {self._epoch.save_aside(FOLDER, call)}."
        raise NonFiniteError(message)


def _first_non_finite(model: keras.Model) -> str | None:
    """Returns the path of the first weight that has a NaN or infinite value."""
    for variable in model.variables:
        value = np.asarray(variable.value)
        if tf.as_dtype(variable.dtype).is_floating and not np.isfinite(value).all():
            return str(variable.path)
    return None


_OUTCOMES = {
    "pad": "Later steps ran without rows from the workers whose data had ended",
    "stop": "The epoch ended where the data of the first worker ended",
}


class BatchCounts(Observer):
    """Counts the batches of workers that each read a dataset of their own.

    Raises:
        DataError: The numbers differ, and `uneven_data` of the data is `"refuse"`.
    """

    def __init__(self, run: RunContext) -> None:
        self._strategy = run.strategy

    def begin_epoch(self, epoch: Epoch) -> None:
        self._epoch = epoch
        self._counts = [0] * self._strategy.group.size

    def columns(self, result: LoopResult) -> list[float]:
        return [result.num_read]

    def compare(self, rows: np.ndarray) -> None:
        self._counts = [n + int(more) for n, more in zip(self._counts, rows[:, 0], strict=True)]
        if self._epoch.data.uneven_data == "refuse" and len(set(self._counts)) > 1:
            raise DataError(uneven_message(self._counts))

    def end_steps(self) -> None:
        sizes, mode = self._epoch.data.sizes, self._epoch.data.uneven_data
        counts = self._counts if sizes is None else sizes
        if len(set(counts)) > 1 and self._strategy.group.is_chief:
            warnings.warn(
                f"The workers had {', '.join(map(str, counts))} batches in {self._epoch.name}, by "
                f"rank. {_OUTCOMES[mode]} (uneven_data={mode!r}).",
                stacklevel=3,
            )
