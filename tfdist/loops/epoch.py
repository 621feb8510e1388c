"""Who hears of the calls of the inner loop: Keras's callbacks, the watchdog, and others.

How fast steps go, and for how long they wait for data.

One pass over the data: the loop that training, evaluation and prediction share.

A call of the inner loop makes several steps. After each call all workers agree whether to go on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import keras
import numpy as np

from tfdist.errors import DataError
from tfdist.loops import interrupts
from tfdist.loops.callbacks import may_change_model
from tfdist.loops.compiled_functions import CompiledFunctions, StepsFn
from tfdist.loops.data_handler import DataHandler
from tfdist.loops.steps_per_call import StepsPerCall, StepsPerCallCache, wants_every_batch
from tfdist.strategies.base import Strategy
from tfdist.strategies.inner_loop import Logs, LoopResult
from tfdist.watchdog.watchdog import Watchdog

#: What Keras calls its loops in the names of callbacks' methods.
Loop = Literal["train", "test", "predict"]

#: The attribute of a model by which a callback stops a loop.
STOP: dict[Loop, str] = {
    "train": "stop_training",
    "test": "stop_evaluating",
    "predict": "stop_predicting",
}


class Call(NamedTuple):
    """A call of the inner loop that made one step or more."""

    last_step: int  # in its epoch, from 0
    made: LoopResult
    seconds: float
    logs: Logs  # after that step


class Observer:
    """Hears of the calls of an epoch; what it does not override does nothing."""

    def begin_epoch(self, feed: DataHandler) -> None:
        """Hears of an epoch and its data, before the first call."""

    def begin_call(self, step: int) -> None:
        """Hears of a call, and of the step, from 0, with which it begins."""

    def end_call(self, call: Call) -> None:
        """Hears of what a call did."""

    def most_steps(self) -> int | None:
        """Returns how many steps the next call may make at most, the same on every worker."""
        return None

    def interrupted(self) -> None:
        """Hears, when all have heard of the last call, that the workers stop after it."""

    def wants_to_stop(self) -> bool:
        """Tells whether the last call is to be that of the epoch; asked when all have heard."""
        return False


class KerasCallbacks(Observer):
    """Callbacks, which hear of each call as of one batch, its last, and may stop the loop."""

    def __init__(
        self, loop: Loop, callbacks: keras.callbacks.CallbackList, model: keras.Model
    ) -> None:
        self._begin = getattr(callbacks, f"on_{loop}_batch_begin")
        self._end = getattr(callbacks, f"on_{loop}_batch_end")
        self._model, self._stop = model, STOP[loop]

    def begin_call(self, step: int) -> None:
        self._begin(step)

    def end_call(self, call: Call) -> None:
        self._end(call.last_step, call.logs)

    def wants_to_stop(self) -> bool:
        return getattr(self._model, self._stop)


class CopySync(Observer):
    """Lets steps go on from what the user's code, the callbacks too, may have made of the model.

    Args:
        sync_copies: Does so; it costs something where variables have copies.
        after_batches: Whether to do so before each call, not only before the first.
    """

    def __init__(self, sync_copies: Callable[[], None], after_batches: bool) -> None:
        self._sync_copies, self._after_batches = sync_copies, after_batches

    def begin_epoch(self, feed: DataHandler) -> None:
        self._wanted = True

    def begin_call(self, step: int) -> None:
        if self._wanted:
            self._sync_copies()
        self._wanted = self._after_batches


class WatchdogMark(Observer):
    """The watchdog, which every call brings a mark further.

    Args:
        watchdog: Passes the marks.
        of: To what the steps belong, as in "step 3 of epoch 1".
        then: What else has been done by then.
    """

    def __init__(self, watchdog: Watchdog, of: str, then: str = "") -> None:
        self._watchdog, self._of, self._then = watchdog, of, then

    def end_call(self, call: Call) -> None:
        self._watchdog.passed(f"step {call.last_step + 1} of {self._of}{self._then}")


class Throughput(Observer):
    """Throughput of the epoch that runs, for progress lines and logs.

    Attributes:
        examples_per_second: Rows of global batches, without the first call, which compiles.
        seconds_per_step: Of the same calls.
        data_wait_share: BatchPart of the time, 0 to 1, in which the devices waited for data.
        steps_of_epoch: All of them so far.
        rows_of_epoch: Of all their global batches.
        last_call: The last call of all; None before the first.
    """

    def __init__(self) -> None:
        self.examples_per_second = 0.0
        self.seconds_per_step = 0.0
        self.data_wait_share = 0.0
        self.steps_of_epoch, self.rows_of_epoch = 0, 0
        self.last_call: Call | None = None
        self._compiled = False
        self._seconds, self._rows, self._waited, self._steps = 0.0, 0, 0.0, 0

    def begin_epoch(self, feed: DataHandler) -> None:
        self.steps_of_epoch, self.rows_of_epoch = 0, 0
        self._seconds, self._rows, self._waited, self._steps = 0.0, 0, 0.0, 0

    def end_call(self, call: Call) -> None:
        self.last_call = call
        self.steps_of_epoch += int(call.made.num_steps)
        self.rows_of_epoch += int(call.made.num_rows)
        if not self._compiled:
            self._compiled = True
            return
        self._seconds += call.seconds
        self._rows += int(call.made.num_rows)
        self._waited += float(call.made.seconds_waited)
        self._steps += int(call.made.num_steps)
        self.seconds_per_step = self._seconds / max(self._steps, 1)
        self.examples_per_second = self._rows / max(self._seconds, 1e-9)
        self.data_wait_share = min(1.0, self._waited / max(self._seconds, 1e-9))


@dataclass(frozen=True)
class OuterLoop:
    """What the loops of one trainer work with.

    Attributes:
        model: In the strategy's scope.
        strategy: By which the workers agree.
        functions: The model's compiled functions.
        watchdog: Hears of every call.
        steps_per_call: As the trainer's.
        cache: Steps per call of the passes that were made.
    """

    model: keras.Model
    strategy: Strategy
    functions: CompiledFunctions
    watchdog: Watchdog
    steps_per_call: int | str
    cache: StepsPerCallCache = field(default_factory=StepsPerCallCache)

    def per_call(
        self, loop: Loop, callbacks: keras.callbacks.CallbackList, feed: DataHandler
    ) -> StepsPerCall:
        """Returns what chooses the number of steps of the calls of a loop; asked by all workers.

        Args:
            loop: Which of Keras's.
            callbacks: Of the loop.
            feed: Of which it makes passes.
        """
        # The rank 0's, as after every call: workers may differ in which data are the same objects.
        known = int(self.strategy.gather([self.cache.known(loop, feed)])[0, 0])
        note = functools.partial(self.cache.note, loop, feed)
        options = self.steps_per_call, self.model, callbacks.callbacks, loop
        return StepsPerCall(*options, known=known, note=note)

    def observers(
        self,
        loop: Loop,
        callbacks: keras.callbacks.CallbackList,
        of: str,
        before: Sequence[Observer] = (),
        after: Sequence[Observer] = (),
    ) -> list[Observer]:
        """Returns who hears of a loop's calls, in the order in which they hear.

        Args:
            loop: Which of Keras's.
            callbacks: Hear of the calls.
            of: What the watchdog calls this pass over the data.
            before: Hear ahead of the callbacks.
            after: Hear after them.
        """
        return [
            WatchdogMark(self.watchdog, of),
            *before,
            KerasCallbacks(loop, callbacks, self.model),
            *after,
            CopySync(
                self.functions.sync_copies,
                any(
                    wants_every_batch(c, loop) and may_change_model(c) for c in callbacks.callbacks
                ),
            ),
            WatchdogMark(self.watchdog, of, " and its callbacks"),
        ]


def run(
    steps: StepsFn,
    feed: DataHandler,
    per_call: StepsPerCall,
    strategy: Strategy,
    observers: Sequence[Observer],
    begin: tuple[int, Logs] = (0, {}),
) -> Logs:
    """Makes the steps of an epoch, the same on every worker.

    Args:
        steps: The inner loop.
        feed: Where the batches come from.
        per_call: Chooses how many steps go into a call.
        strategy: By which the workers agree.
        observers: Hear of each call, one after another; any of them may stop the epoch.
        begin: The steps of the epoch that were made before, and the logs after them.

    Returns:
        The logs after the last step.

    Raises:
        DataError: The workers were fed different batches, or none.
        KeyboardInterrupt: On all workers, after the same step, where one of them was interrupted; a
            `Preempted` where a scheduler wants its machine back, a `TimeIsUp` where its time is.
    """
    for observer in observers:
        observer.begin_epoch(feed)
    step, logs = begin
    iterator, exhausted, stopped = feed.begin_epoch(step), False, False
    while (wanted := _num_steps(feed, step, per_call, observers)) and not exhausted and not stopped:
        for observer in observers:
            observer.begin_call(step)
        per_call.begin_call()
        made, results = steps(iterator, wanted)
        seconds = per_call.end_call(made.num_steps)
        last = per_call.last_step(step, made.num_steps)
        step += made.num_steps
        exhausted = made.num_steps < wanted
        if made.num_steps:
            logs = results
            for observer in observers:
                observer.end_call(Call(last, made, seconds, logs))
            stopped = any(observer.wants_to_stop() for observer in observers)
        # One worker's clock, callbacks and signals decide for all: none may go on alone.
        said = [per_call.num_steps, stopped, made.checksum, interrupts.pending()]
        told = strategy.gather(said)
        _check_same_batches(told[:, 2], step)
        if (pending := int(told[:, 3].max())) != 0:
            for observer in observers:
                observer.interrupted()
            raise interrupts.stop(pending)
        per_call.num_steps, stopped = int(told[0, 0]), bool(told[:, 1].any())
    feed.end_epoch(step, exhausted, stopped)
    per_call.end_pass()
    return logs


def _num_steps(
    feed: DataHandler, made: int, per_call: StepsPerCall, observers: Sequence[Observer]
) -> int:
    """How many steps the next call is to make; none is left: 0."""
    bounds = [observer.most_steps() for observer in observers]
    most = min([per_call.num_steps, *(bound for bound in bounds if bound is not None)])
    return feed.num_left(made, most, per_call.at_once)


def _check_same_batches(checksums: np.ndarray, step: int) -> None:
    """Checks that all workers were fed the same global batches.

    Raises:
        DataError: They were not.
    """
    others = np.flatnonzero(checksums != checksums[0])
    if len(others):
        raise DataError(
            f"Up to step {step} rank {others[0]} was fed other batches than rank 0, so rows were "
            "lost or seen twice: seed what shuffles the data (keras.utils.set_random_seed before "
            "they are made), or pass a function of a tf.distribute.InputContext."
        )
