"""How many steps go into one call of the inner loop.

How many steps went into a call when data were gone through last: the next pass begins so.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from typing import Any

import keras

from tfdist.errors import ConfigurationError
from tfdist.loops.data_handler import DataHandler
from tfdist.upstream import keras_data

#: Seconds that a call should last: long enough to make Python's share small, short enough for a
#: progress line and for Ctrl-C.
TARGET_SECONDS = 0.25


class StepsPerCall:
    """Chooses the number of steps of each call.

    Args:
        steps_per_call: A number, or `"auto"`: every step by itself for callbacks that want each
            batch, otherwise calls of about `TARGET_SECONDS`.
        model: Whose `steps_per_execution`, if above 1, counts as Keras means it.
        callbacks: Of this call.
        loop: Whose batches they may want: `"train"`, `"test"` or `"predict"`.
        known: Steps of a call that are known to last about as long; 0: none are.
        note: Is told, at the end of each pass over the data, those that were found.

    Attributes:
        num_steps: Of the next call.
        at_once: Steps that Keras makes without asking whether they are wanted: so many as
            `steps_per_execution` end an epoch of `steps_per_epoch`, whatever is left of these.

    Raises:
        ConfigurationError: A number below 1, or a word that is not `"auto"`.
    """

    def __init__(
        self,
        steps_per_call: int | str,
        model: keras.Model,
        callbacks: Sequence[keras.callbacks.Callback],
        loop: str = "train",
        known: int = 0,
        note: Callable[[int], None] | None = None,
    ) -> None:
        if steps_per_call != "auto" and not (
            isinstance(steps_per_call, int) and steps_per_call >= 1
        ):
            raise ConfigurationError(
                f"steps_per_call={steps_per_call!r}: expected 'auto' or a number from 1."
            )
        fixed = steps_per_call if isinstance(steps_per_call, int) else None
        self.at_once = model.steps_per_execution if model.compiled else 1
        self._counted = 0
        if fixed is None and self.at_once > 1:
            fixed = self._counted = self.at_once
        if fixed is None and any(wants_every_batch(c, loop) for c in callbacks):
            fixed = 1
        self._adapts = fixed is None
        self.num_steps = fixed or known or 1
        self._note = note
        self._began = 0.0
        # The first call compiles, and tells nothing.
        self._tells = known > 0

    def begin_call(self) -> None:
        """Starts the clock."""
        self._began = time.perf_counter()

    def end_call(self, made: int) -> float:
        """Stops the clock and sets the next call's number of steps; returns the seconds."""
        seconds = time.perf_counter() - self._began
        if self._adapts and self._tells and made:
            fitting = int(TARGET_SECONDS * made / max(seconds, 1e-6))
            self.num_steps = max(1, min(fitting, 8 * self.num_steps))
        self._tells = True
        return seconds

    def end_pass(self) -> None:
        """Notes what was found in a pass over the data."""
        if self._adapts and self._tells and self._note:
            self._note(self.num_steps)

    def last_step(self, first: int, made: int) -> int:
        """Returns the number of a call's last step, from 0, as callbacks are told it.

        Keras counts a last call of fewer than `steps_per_execution` steps as if it had made them.

        Args:
            first: The number of its first step.
            made: How many steps it made.
        """
        return first + (self._counted or made) - 1


def wants_every_batch(callback: keras.callbacks.Callback, loop: str = "train") -> bool:
    """Tells whether a callback does something at each batch of a loop, as Keras names it.

    Keras's own ModelCheckpoint, BackupAndRestore and TensorBoard define the methods but use them
    only when told to work by batches; progress bars take batches in any portion, and so does
    another that says `every_batch = False`.
    """
    any_portion = not getattr(callback, "every_batch", True)
    if any_portion or isinstance(callback, keras.callbacks.ProgbarLogger):
        return False
    if isinstance(callback, keras.callbacks.TensorBoard):
        traces = loop == "train" and keras_data.profiles_batches(callback)
        return callback.update_freq != "epoch" or traces
    if loop != "train":
        return any(_overrides(callback, f"on_{loop}_batch_{when}") for when in ("begin", "end"))
    if isinstance(callback, (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)):
        return callback.save_freq != "epoch"
    names = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
    return any(_overrides(callback, name) for name in names)


def _overrides(callback: Any, name: str) -> bool:
    """Whether a method is not the base class's, on the class or (LambdaCallback) the instance."""
    method = getattr(callback, name)
    base = getattr(keras.callbacks.Callback, name)
    return getattr(method, "__func__", method) is not base


class StepsPerCallCache:
    """Steps per call, by the loop and the data.

    Data are the same where they are the same object, or arrays of the same shapes in batches of the
    same size. Others may be slower to read, and a call at the pace of those before would last.
    """

    def __init__(self) -> None:
        self._of_arrays: dict[Hashable, int] = {}
        self._of_data: MutableMapping[Any, dict[str, int]] = weakref.WeakKeyDictionary()

    def known(self, loop: str, feed: DataHandler) -> int:
        """Returns what was noted last; 0: nothing was.

        Args:
            loop: Which of Keras's.
            feed: Of the data.
        """
        if feed.are_arrays:
            return self._of_arrays.get((loop, _kind(feed)), 0)
        own = self._of_data.get(feed.source) if _is_kept(feed.source) else None
        return own.get(loop, 0) if own else 0

    def note(self, loop: str, feed: DataHandler, num_steps: int) -> None:
        """Keeps a number of steps for the next pass over the same data."""
        if feed.are_arrays:
            self._of_arrays[loop, _kind(feed)] = num_steps
        elif _is_kept(feed.source):
            self._of_data.setdefault(feed.source, {})[loop] = num_steps


def _kind(feed: DataHandler) -> Hashable:
    return feed.batch_size, str(feed.element_spec)


def _is_kept(source: Any) -> bool:
    """Whether an object can be known again without being kept alive."""
    return isinstance(source, Hashable) and type(source).__weakrefoffset__ != 0
