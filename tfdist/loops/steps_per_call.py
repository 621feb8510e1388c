"""Chooses the number of steps per call of the inner loop."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable, MutableMapping
from typing import Any

import keras

from tfdist.errors import ConfigurationError
from tfdist.loops.data_handler import DataHandler
from tfdist.upstream import keras_training

#: Target duration of a call in seconds: long enough for a small overhead of Python, and short
#: enough for progress bars and Ctrl-C.
TARGET_SECONDS = 0.25


class StepsPerCall:
    """Chooses the number of steps of each call.

    Args:
        steps_per_call: A number, or `"auto"`: one step per call with `every_batch`, otherwise calls
            of about `TARGET_SECONDS`.
        model: Its `steps_per_execution`, if above 1, has the same effect as in Keras.
        every_batch: Whether a callback of any worker must be called after every batch.
        known: Number of steps that took about `TARGET_SECONDS` in an earlier pass; 0 if unknown.
        note: Called with that number at the end of each pass over the data.

    Attributes:
        num_steps: Number of steps of the next call.
        one_by_one: Whether every call makes one step.
        at_once: `steps_per_execution`. Keras rounds `steps_per_epoch` up to a multiple of it.

    Raises:
        ConfigurationError: `steps_per_call` is neither `"auto"` nor at least 1.
    """

    def __init__(
        self,
        steps_per_call: int | str,
        model: keras.Model,
        every_batch: bool = False,
        known: int = 0,
        note: Callable[[int], None] | None = None,
    ) -> None:
        if steps_per_call != "auto" and not (
            isinstance(steps_per_call, int) and steps_per_call >= 1
        ):
            raise ConfigurationError(
                f"steps_per_call={steps_per_call!r}: expected 'auto' or an integer of at least 1."
            )
        fixed = steps_per_call if isinstance(steps_per_call, int) else None
        self.at_once = model.steps_per_execution if model.compiled else 1
        self._counted = 0
        if fixed is None and self.at_once > 1:
            fixed = self._counted = self.at_once
        if fixed is None and every_batch:
            fixed = 1
        self.one_by_one = fixed == 1
        self._adapts = fixed is None
        self.num_steps = fixed or known or 1
        self._note = note
        self._began = 0.0
        # The first call compiles, and is not measured.
        self._is_measured = known > 0

    def begin_call(self) -> None:
        """Starts timing a call."""
        self._began = time.perf_counter()

    def end_call(self, num_steps_made: int) -> float:
        """Returns the duration of a call in seconds, and sets `num_steps` of the next one."""
        seconds = time.perf_counter() - self._began
        if self._adapts and self._is_measured and num_steps_made:
            fitting = int(TARGET_SECONDS * num_steps_made / max(seconds, 1e-6))
            self.num_steps = max(1, min(fitting, 8 * self.num_steps))
        self._is_measured = True
        return seconds

    def end_pass(self) -> None:
        """Calls `note` at the end of a pass over the data."""
        if self._adapts and self._is_measured and self._note:
            self._note(self.num_steps)

    def last_step(self, first: int, num_steps_made: int) -> int:
        """Returns the number of a call's last step, from 0, for callbacks.

        Keras counts a last call of fewer than `steps_per_execution` steps as a full one.

        Args:
            first: Number of the call's first step.
            num_steps_made: Number of steps of the call.
        """
        return first + (self._counted or num_steps_made) - 1


def wants_every_batch(callback: keras.callbacks.Callback, loop: str = "train") -> bool:
    """Returns whether a callback must be called after every batch of a loop.

    Keras's ModelCheckpoint, BackupAndRestore and TensorBoard define the methods, but use them only
    if configured to work by batches. Progress bars work with any number of batches, and so do
    callbacks that set `every_batch = False`.
    """
    takes_any_number = not getattr(callback, "every_batch", True)
    if takes_any_number or isinstance(callback, keras.callbacks.ProgbarLogger):
        return False
    if isinstance(callback, keras.callbacks.TensorBoard):
        traces = loop == "train" and keras_training.profiles_batches(callback)
        return callback.update_freq != "epoch" or traces
    if loop != "train":
        return any(_overrides(callback, f"on_{loop}_batch_{when}") for when in ("begin", "end"))
    if isinstance(callback, (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)):
        return callback.save_freq != "epoch"
    names = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
    return any(_overrides(callback, name) for name in names)


def runs_before_batches(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback is called before each call of the training loop."""
    names = ("on_train_batch_begin", "on_batch_begin")
    return any(_overrides(callback, name) for name in names)


def _overrides(callback: Any, name: str) -> bool:
    """Returns whether a method is overridden, by the class or (LambdaCallback) by the instance."""
    method = getattr(callback, name)
    base = getattr(keras.callbacks.Callback, name)
    return getattr(method, "__func__", method) is not base


class StepsPerCallCache:
    """Stores the number of steps per call by loop and data, for the next pass over the same data.

    Data counts as the same if it is the same object, or consists of arrays of the same shapes with
    the same batch size. Other data may be slower to read, so that a call with as many steps would
    take too long.
    """

    def __init__(self) -> None:
        self._of_arrays: dict[Hashable, int] = {}
        self._of_data: MutableMapping[Any, dict[str, int]] = weakref.WeakKeyDictionary()

    def known(self, loop: str, data: DataHandler) -> int:
        """Returns the stored number, or 0."""
        if data.are_arrays:
            return self._of_arrays.get((loop, _kind(data)), 0)
        by_loop = self._of_data.get(data.source) if _is_hashable(data.source) else None
        return by_loop.get(loop, 0) if by_loop else 0

    def note(self, loop: str, data: DataHandler, num_steps: int) -> None:
        """Stores a number of steps for the next pass over the same data."""
        if data.are_arrays:
            self._of_arrays[loop, _kind(data)] = num_steps
        elif _is_hashable(data.source):
            self._of_data.setdefault(data.source, {})[loop] = num_steps


def _kind(data: DataHandler) -> Hashable:
    return data.batch_size, str(data.element_spec)


def _is_hashable(source: Any) -> bool:
    return isinstance(source, Hashable) and type(source).__weakrefoffset__ != 0
