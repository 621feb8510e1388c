"""Who hears of the calls of the inner loop: Keras's callbacks, the watchdog, and others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import keras

from tfdist.loops.feed import Feed
from tfdist.strategies.inner_loop import Logs, Made
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
    made: Made
    seconds: float
    logs: Logs  # after that step


class Observer:
    """Hears of the calls of an epoch; what it does not override does nothing."""

    def begin_epoch(self, feed: Feed) -> None:
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


class TakingOver(Observer):
    """Lets steps go on from what the user's code, the callbacks too, may have made of the model.

    Args:
        take_over: Does so; it costs something where variables have copies.
        after_batches: Whether to do so before each call, not only before the first.
    """

    def __init__(self, take_over: Callable[[], None], after_batches: bool) -> None:
        self._take_over, self._after_batches = take_over, after_batches

    def begin_epoch(self, feed: Feed) -> None:
        self._wanted = True

    def begin_call(self, step: int) -> None:
        if self._wanted:
            self._take_over()
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
