"""One pass over the data: the loop that training, evaluation and prediction share.

A call of the inner loop runs several steps. After each call, observers are notified (callbacks,
watchdog, checkpoints, throughput), and all workers agree whether to continue.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import keras
import numpy as np

from tfdist.cluster.watchdog.watchdog import Watchdog
from tfdist.errors import DataError
from tfdist.loops import interrupts
from tfdist.loops.callbacks import may_change_model
from tfdist.loops.data_handler import DataHandler
from tfdist.loops.functions import CompiledFunctions, Loop, StepsFn
from tfdist.loops.self_check import SelfCheck
from tfdist.loops.steps_per_call import StepsPerCall, StepsPerCallCache, wants_every_batch
from tfdist.strategies.base import Strategy
from tfdist.strategies.inner_loop import Logs, LoopResult
from tfdist.strategies.replica_sync import ReplicaSync

#: The attribute of a model by which a callback stops a loop.
STOP: dict[Loop, str] = {
    "train": "stop_training",
    "test": "stop_evaluating",
    "predict": "stop_predicting",
}


class Call(NamedTuple):
    """A call of the inner loop that ran at least one step.

    Attributes:
        last_step: Number of its last step in the epoch, from 0.
        result: The result of the call.
        seconds: Duration of the call.
        logs: Logs after the last step.
    """

    last_step: int
    result: LoopResult
    seconds: float
    logs: Logs


class Observer:
    """Is notified of the calls of an epoch. Methods that are not overridden do nothing."""

    def begin_epoch(self, data: DataHandler) -> None:
        """Called with the data of an epoch, before its first call."""

    def begin_call(self, step: int) -> None:
        """Called before a call, with the number of its first step, from 0."""

    def end_call(self, call: Call) -> None:
        """Called after a call."""

    def max_steps(self) -> int | None:
        """Returns the maximum number of steps of the next call, the same on every worker."""
        return None

    def columns(self, result: LoopResult) -> list[float]:
        """Returns numbers to all-gather after each call.

        All workers return the same number of values.

        Args:
            result: The result of the call, possibly without steps.
        """
        return []

    def compare(self, rows: np.ndarray) -> None:
        """Called with the all-gathered `columns`: one row per worker."""

    def interrupted(self) -> None:
        """Called if the workers stop after the last call, after `end_call` of all observers."""

    def wants_to_stop(self) -> bool:
        """Returns whether to end the epoch after the last call; called after all `end_call`s."""
        return False


class KerasCallbacks(Observer):
    """Notifies Keras callbacks of each call as one batch, its last one. They may stop the loop.

    Args:
        loop: Keras's name of the loop.
        callbacks: The callbacks.
        model: The model that they may stop.
        watching: Returns a context that records how callbacks change the model.
    """

    def __init__(
        self,
        loop: Loop,
        callbacks: keras.callbacks.CallbackList,
        model: keras.Model,
        watching: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._begin = getattr(callbacks, f"on_{loop}_batch_begin")
        self._end = getattr(callbacks, f"on_{loop}_batch_end")
        self._model, self._stop, self._watching = model, STOP[loop], watching

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
        functions: The compiled functions, which re-synchronize the replicas.
        after_batches: Whether to synchronize before each call, and not only before the first.
    """

    def __init__(self, functions: CompiledFunctions, after_batches: bool) -> None:
        self._functions, self._after_batches = functions, after_batches

    def begin_epoch(self, data: DataHandler) -> None:
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
    """Reports the progress of every call to the watchdog.

    Args:
        watchdog: The watchdog.
        of: What the steps belong to, as in "step 3 of epoch 1".
        suffix: What else is completed at that point.
    """

    def __init__(self, watchdog: Watchdog, of: str, suffix: str = "") -> None:
        self._watchdog, self._of, self._suffix = watchdog, of, suffix

    def end_call(self, call: Call) -> None:
        self._watchdog.passed(f"step {call.last_step + 1} of {self._of}{self._suffix}")


class Throughput(Observer):
    """Throughput of the current epoch, for progress bars and logs.

    The first call compiles the step, and is not included in rates and times.

    Attributes:
        examples_per_second: Rows of global batches per second.
        seconds_per_step: Duration of a step.
        data_wait_share: Fraction of the time, 0 to 1, that devices waited for data.
        steps_of_epoch: Steps of this epoch so far.
        rows_of_epoch: Rows of their global batches.
        last_call: The last call; None before the first.
    """

    def __init__(self) -> None:
        self.examples_per_second = 0.0
        self.seconds_per_step = 0.0
        self.data_wait_share = 0.0
        self.steps_of_epoch, self.rows_of_epoch = 0, 0
        self.last_call: Call | None = None
        self._compiled = False
        self._seconds, self._rows, self._waited, self._steps = 0.0, 0, 0.0, 0

    def begin_epoch(self, data: DataHandler) -> None:
        self.steps_of_epoch, self.rows_of_epoch = 0, 0
        self._seconds, self._rows, self._waited, self._steps = 0.0, 0, 0.0, 0

    def end_call(self, call: Call) -> None:
        self.last_call = call
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


@dataclass(frozen=True)
class OuterLoop:
    """The objects that all loops of one trainer share.

    Attributes:
        model: A model that was created in the strategy's scope.
        strategy: The strategy.
        functions: The model's compiled functions.
        watchdog: The watchdog, which is notified of every call.
        steps_per_call: As in `Trainer`.
        self_check: Verifies each loop at its first use.
        cache: Number of steps per call in earlier passes.
    """

    model: keras.Model
    strategy: Strategy
    functions: CompiledFunctions
    watchdog: Watchdog
    steps_per_call: int | str
    self_check: SelfCheck
    cache: StepsPerCallCache = field(default_factory=StepsPerCallCache)

    def per_call(
        self, loop: Loop, callbacks: keras.callbacks.CallbackList, data: DataHandler
    ) -> StepsPerCall:
        """Returns the object that chooses the number of steps per call. All workers must call it.

        Args:
            loop: Keras's name of the loop.
            callbacks: The callbacks of the loop.
            data: The data of the loop.
        """
        every_batch = any(wants_every_batch(c, loop) for c in callbacks.callbacks)
        all_workers = self.strategy.group.gather([self.cache.known(loop, data), every_batch])
        return StepsPerCall(
            self.steps_per_call,
            self.model,
            every_batch=bool(all_workers[:, 1].any()),
            # Rank 0 decides: the data may be the same object as before only on some workers.
            known=int(all_workers[0, 0]),
            note=functools.partial(self.cache.note, loop, data),
        )

    def observers(
        self,
        loop: Loop,
        callbacks: keras.callbacks.CallbackList,
        of: str,
        before: Sequence[Observer] = (),
        after: Sequence[Observer] = (),
    ) -> list[Observer]:
        """Returns the observers of a loop, in the order in which they are notified.

        Args:
            loop: Keras's name of the loop.
            callbacks: The callbacks of the loop.
            of: Description of this pass over the data, for the watchdog.
            before: Observers that are notified before the callbacks.
            after: Observers that are notified after them.
        """
        changes_model = any(
            wants_every_batch(c, loop) and may_change_model(c) for c in callbacks.callbacks
        )
        copy_sync = CopySync(self.functions, changes_model)
        return [
            WatchdogMark(self.watchdog, of),
            *before,
            KerasCallbacks(loop, callbacks, self.model, copy_sync.watching),
            *after,
            copy_sync,
            WatchdogMark(self.watchdog, of, " and its callbacks"),
        ]


def run(
    steps: StepsFn,
    data: DataHandler,
    per_call: StepsPerCall,
    strategy: Strategy,
    observers: Sequence[Observer],
    begin: tuple[int, Logs] = (0, {}),
) -> Logs:
    """Runs the steps of an epoch, the same number on every worker.

    After each call, each of n workers receives about ten numbers from each worker: O(n).

    Args:
        steps: The inner loop.
        data: The data.
        per_call: Chooses the number of steps per call.
        strategy: The strategy.
        observers: Notified of each call, in this order; any of them may stop the epoch.
        begin: Number of completed steps of the epoch, and the logs after them.

    Returns:
        The logs after the last step.

    Raises:
        DataError: The workers got different batches, or there is no data.
        ClusterError: The workers differ in another way; see `rank_checks`.
        KeyboardInterrupt: One worker was interrupted; raised on all workers after the same step.
            `Preempted` if a scheduler preempts the run, `TimeIsUp` if the time limit has passed.
    """
    for observer in observers:
        observer.begin_epoch(data)
    step, logs = begin
    iterator, exhausted, stopped = data.begin_epoch(step), False, False
    while (
        (num_steps := _num_steps(data, step, per_call, observers)) and not exhausted and not stopped
    ):
        for observer in observers:
            observer.begin_call(step)
        per_call.begin_call()
        result, call_logs = steps(iterator, num_steps)
        seconds = per_call.end_call(result.num_steps)
        last = per_call.last_step(step, result.num_steps)
        step += result.num_steps
        exhausted = result.num_steps < num_steps
        if result.num_steps:
            logs = call_logs
            for observer in observers:
                observer.end_call(Call(last, result, seconds, logs))
            stopped = any(observer.wants_to_stop() for observer in observers)
        # The clock of rank 0, and callbacks and signals of any worker, decide for all workers.
        state = [per_call.num_steps, stopped, result.checksum, interrupts.pending()]
        columns = [observer.columns(result) for observer in observers]
        all_workers = strategy.group.gather([*state, *itertools.chain.from_iterable(columns)])
        check_same_batches(all_workers[:, 2], step)
        first = len(state)
        for observer, numbers in zip(observers, columns, strict=True):
            if numbers:
                observer.compare(all_workers[:, first : first + len(numbers)])
            first += len(numbers)
        if (pending := int(all_workers[:, 3].max())) != 0:
            for observer in observers:
                observer.interrupted()
            del iterator
            data.discard_iterator()
            raise interrupts.stop(pending)
        per_call.num_steps, stopped = int(all_workers[0, 0]), bool(all_workers[:, 1].any())
    data.end_epoch(step, exhausted, stopped)
    per_call.end_pass()
    return logs


def _num_steps(
    data: DataHandler, num_done: int, per_call: StepsPerCall, observers: Sequence[Observer]
) -> int:
    """Returns the number of steps of the next call; 0 if none is left."""
    bounds = [observer.max_steps() for observer in observers]
    requested = min([per_call.num_steps, *(bound for bound in bounds if bound is not None)])
    return data.num_left(num_done, requested, per_call.at_once)


def check_same_batches(checksums: np.ndarray, step: int) -> None:
    """Checks that all workers got the same global batches.

    Raises:
        DataError: The batches differ.
    """
    others = np.flatnonzero(checksums != checksums[0])
    if len(others):
        raise DataError(
            f"Up to step {step}, rank {others[0]} got different batches from rank 0, so rows were "
            "skipped or used twice. Seed the shuffling (keras.utils.set_random_seed before you "
            "create the data), or pass a function of a tf.distribute.InputContext."
        )
