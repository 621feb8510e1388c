"""One pass over the data: the loop that training, evaluation and prediction share.

A call of the inner loop makes several steps. After each call all workers agree whether to go on.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import keras
import numpy as np

from tfdist.errors import DataError
from tfdist.loops import interrupts
from tfdist.loops.callback_roles import may_change_model
from tfdist.loops.compiled_functions import CompiledFunctions, StepsFn
from tfdist.loops.feed import Feed
from tfdist.loops.observers import Call, KerasCallbacks, Loop, Observer, TakingOver, WatchdogMark
from tfdist.loops.paces import Paces
from tfdist.loops.steps_per_call import StepsPerCall, wants_every_batch
from tfdist.strategies.base import Strategy
from tfdist.strategies.inner_loop import Logs
from tfdist.watchdog.watchdog import Watchdog


@dataclass(frozen=True)
class OuterLoop:
    """What the loops of one trainer work with.

    Attributes:
        model: In the strategy's scope.
        strategy: By which the workers agree.
        functions: The model's compiled functions.
        watchdog: Hears of every call.
        steps_per_call: As the trainer's.
        paces: Steps per call of the passes that were made.
    """

    model: keras.Model
    strategy: Strategy
    functions: CompiledFunctions
    watchdog: Watchdog
    steps_per_call: int | str
    paces: Paces = field(default_factory=Paces)

    def per_call(
        self, loop: Loop, callbacks: keras.callbacks.CallbackList, feed: Feed
    ) -> StepsPerCall:
        """Returns what chooses the number of steps of the calls of a loop; asked by all workers.

        Args:
            loop: Which of Keras's.
            callbacks: Of the loop.
            feed: Of which it makes passes.
        """
        # The rank 0's, as after every call: workers may differ in which data are the same objects.
        known = int(self.strategy.gather([self.paces.known(loop, feed)])[0, 0])
        note = functools.partial(self.paces.note, loop, feed)
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
            TakingOver(
                self.functions.take_over,
                any(
                    wants_every_batch(c, loop) and may_change_model(c) for c in callbacks.callbacks
                ),
            ),
            WatchdogMark(self.watchdog, of, " and its callbacks"),
        ]


def run(
    steps: StepsFn,
    feed: Feed,
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


def _num_steps(feed: Feed, made: int, per_call: StepsPerCall, observers: Sequence[Observer]) -> int:
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
