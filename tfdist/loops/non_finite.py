"""Warns or stops when the training loss becomes NaN or infinite."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Literal, get_args

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import ConfigurationError, NonFiniteError
from tfdist.loops.data_handler import DataHandler
from tfdist.loops.epoch import Call, Observer

#: Warn once and continue; raise an error; or save the state to a separate folder and raise.
OnNan = Literal["warn", "stop", "checkpoint"]

#: The folder of the states that `"checkpoint"` saves, in that of the checkpoints.
FOLDER = "non-finite"


class NonFiniteLoss(Observer):
    """Checks the loss after every call of the inner loop, when it is on the host anyway.

    A non-finite loss in the first call is always an error.

    Args:
        model: The model that is trained.
        on_nan: What to do.

    Attributes:
        save_aside: Saves the state after a call to a folder with the given name; for
            `"checkpoint"`.
        place: The name of the epoch, for messages.

    Raises:
        ConfigurationError: `on_nan` is unknown.
    """

    def __init__(self, model: keras.Model, on_nan: OnNan) -> None:
        if on_nan not in get_args(OnNan):
            raise ConfigurationError(
                f"on_nan={on_nan!r}: expected one of {', '.join(get_args(OnNan))}."
            )
        self._model, self._on_nan = model, on_nan
        self._is_first_call, self._has_warned = True, False
        self._skipped_steps = 0.0  # at the last finite loss
        self.save_aside: Callable[[str, Call], str] = lambda name, call: ""
        self.place = ""

    def begin_epoch(self, data: DataHandler) -> None:
        self._data = data

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
            raise NonFiniteError(_first_batch_message(self._data, loss))
        if self._has_warned:
            return
        self._has_warned = True
        message = self._message(call)
        if self._on_nan == "warn":
            warnings.warn(message, stacklevel=2)
            return
        if self._on_nan == "checkpoint":
            path = self.save_aside(FOLDER, call)
            message += f" The state was saved to {path}."
        raise NonFiniteError(message)

    def _message(self, call: Call) -> str:
        names = [name for name, value in call.logs.items() if not math.isfinite(value)]
        last, num_steps = call.last_step + 1, max(1, int(call.result.num_steps))
        steps = f"step {last}" if num_steps == 1 else f"steps {last - num_steps + 1} to {last}"
        weight = _first_non_finite(self._model)
        weights = f"The first weight that is not finite is {weight!r}." if weight else (
            "All weights are still finite."
        )  # fmt: skip
        return (
            f"{', '.join(names)} became {call.logs['loss']} in {steps} of {self.place}. {weights} "
            "Lower the learning rate, clip gradients (clipnorm), or look for NaN in the data."
        )


def _first_non_finite(model: keras.Model) -> str | None:
    """Returns the path of the first weight that has a NaN or infinite value."""
    for variable in model.variables:
        value = np.asarray(variable.value)
        if tf.as_dtype(variable.dtype).is_floating and not np.isfinite(value).all():
            return str(variable.path)
    return None


def _first_batch_message(data: DataHandler, loss: float) -> str:
    leaves = tf.nest.flatten(data.first_batch(), expand_composites=True)
    arrays = [np.asarray(leaf) for leaf in leaves]
    bad = sum(int(np.sum(~np.isfinite(a))) for a in arrays if a.dtype.kind == "f")
    return f"The loss of the first batch is {loss}. " + (
        f"{bad} values of a batch are NaN or infinite: clean the data."
        if bad
        else "The values of the first batch without shuffling are finite. Lower the learning rate, "
        "check the loss, or look for NaN in the data."
    )
