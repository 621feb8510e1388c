"""The copies of a model's variables that a strategy keeps, one on each further device.

A model has plain variables, on the first device, and is a plain Keras model to whoever touches it.
Only while the replicas of a strategy are traced does each find the copy on its own device in their
place. Steps change all copies alike; what else changes the model changes the first, and the others
take it over before the next step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import keras
import tensorflow as tf

from tfdist.upstream import keras_model
from tfdist.upstream.keras_variables import take_for

_NAME = "_tfdist_copies"  # of the attribute that has them: they live as long as the variable
_local = threading.local()


def of(variable: tf.Variable) -> dict[str, tf.Variable]:
    """Returns the copies of a variable on other devices than its own, by device."""
    return getattr(variable, _NAME, {})


def found() -> AbstractContextManager[None]:
    """Returns a context in which Keras's variables are the copies on the device that is `on`."""
    return keras_model.values_chosen_by(here)


@contextmanager
def on(device: str) -> Iterator[None]:
    """Within it this thread finds the copies on a device; `""`: the variables themselves."""
    before = getattr(_local, "device", "")
    _local.device = device
    try:
        yield
    finally:
        _local.device = before


def here(variable: tf.Variable) -> tf.Variable:
    """Returns a variable's copy on the device that is `on`; without one, the variable itself."""
    return of(variable).get(getattr(_local, "device", ""), variable)


def make_equal(variables: Sequence[keras.Variable], devices: Sequence[str]) -> None:
    """Gives the copies on devices the values of the variables themselves, making what is missing.

    To be called outside of any graph. One by one, some 20 microseconds each: a compiled function
    would keep the model alive, and tracing it takes as long as a hundred calls.

    Args:
        variables: Initialised ones.
        devices: Others than those of the variables.
    """
    for variable in variables if devices else ():
        plain = variable.value
        value, by_device = plain.read_value(), vars(plain).setdefault(_NAME, {})
        for device in devices:
            if device in by_device:
                by_device[device].assign(value)
            else:
                by_device[device] = _made(plain, value, device)


def _made(variable: tf.Variable, value: tf.Tensor, device: str) -> tf.Variable:
    with tf.device(device):
        copy = tf.Variable(value, trainable=variable.trainable)
    take_for(copy, variable)
    return copy
