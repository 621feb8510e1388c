"""Mirrored variables: the variables of the other replicas.

The first replica uses the model's own variables, so that the model stays a plain Keras model for
all other code. While a strategy traces the other replicas, each reads its mirrored variables on its
own device instead. Training steps update the variables of all replicas equally. All other code
changes only the model's own variables, and `sync` updates the mirrored ones before the next step.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf

from tfdist.groups.base import ProcessGroup
from tfdist.strategies.variables import ReplicaSync, VariableLayout
from tfdist.upstream import keras_model
from tfdist.upstream.keras_variables import share_identity, values_of
from tfdist.upstream.tensorflow_calls import ChangesOfVariables

#: Assigning up to this many variables one by one is faster than a compiled function for all.
_FEW = 8
_NAME = "_tfdist_copies"  # attribute of a variable that holds its mirrored variables
_local = threading.local()


def copies_of(variable: tf.Variable) -> dict[str, tf.Variable]:
    """Returns the mirrored variables of a variable, by device."""
    return getattr(variable, _NAME, {})


def has_copies(variable: tf.Variable) -> bool:
    """Returns whether a variable is one of those that each replica has: the original or a copy."""
    return _NAME in vars(variable)


def read_local() -> AbstractContextManager[None]:
    """Returns a context in which Keras's variables are those of the device of `on_device`."""
    return keras_model.values_chosen_by(local)


@contextmanager
def on_device(device: str) -> Iterator[None]:
    """A context in which this thread reads the variables on a device; `""`: the model's own."""
    before = getattr(_local, "device", "")
    _local.device = device
    try:
        yield
    finally:
        _local.device = before


def local(variable: tf.Variable) -> tf.Variable:
    """Returns the mirrored variable on the device of `on_device`, or the variable itself."""
    return copies_of(variable).get(getattr(_local, "device", ""), variable)


def sync(variables: Sequence[keras.Variable], devices: Sequence[str]) -> None:
    """Copies the values of variables to other devices, and creates missing mirrored variables.

    Call it outside of any graph. It assigns one by one, which takes some 20 microseconds each;
    `FrequentSync` is faster before every step.
    """
    for variable in variables if devices else ():
        plain = variable.value
        value, by_device = plain.read_value(), vars(plain).setdefault(_NAME, {})
        for device in devices:
            if device in by_device:
                by_device[device].assign(value, read_value=False)
            else:
                with tf.device(device):
                    copy = tf.Variable(
                        value, trainable=plain.trainable, name=keras_model.plain_name(plain)
                    )
                share_identity(copy, plain)
                vars(copy)[_NAME] = {}
                by_device[device] = copy


def forget(variables: Sequence[keras.Variable]) -> None:
    """Drops mirrored variables whose steps are gone, so that no other strategy finds old values."""
    for value in itertools.chain.from_iterable(map(values_of, variables)):
        vars(value).pop(_NAME, None)


class MirroredVariables(VariableLayout):
    """A set of variables on the device of each replica of the process.

    Args:
        devices, group: As for `VariableLayout`.
        others: Full names of the devices of all replicas but the first, which has the model's own
            variables.
    """

    def __init__(self, devices: Sequence[str], group: ProcessGroup, others: Sequence[str]) -> None:
        super().__init__(devices, group)
        self._others = list(others)

    def sync_copies(self, variables: Sequence[keras.Variable]) -> None:
        sync(variables, self._others)

    def frequent_sync(self, variables: Sequence[keras.Variable]) -> ReplicaSync:
        if not self._others:
            return super().frequent_sync(variables)
        return FrequentSync(variables, self._others)


class Difference(NamedTuple):
    """A variable whose mirrored variable on another device differs."""

    variable: keras.Variable
    device: str
    largest: float  # the largest difference of an element


def first_difference(variables: Sequence[keras.Variable]) -> Difference | None:
    """Returns the first variable that differs between replicas by more than rounding, if any.

    Call it after a step, before user code changes variables. Each device sends a number for each
    variable, and all elements of those whose numbers differ.
    """
    pairs = [(v, original) for v in variables for original in values_of(v) if copies_of(original)]
    if not pairs:
        return None
    first = tf.stack([_digest(original) for _, original in pairs]).numpy()
    by_device: dict[str, dict[int, tf.Tensor]] = {}
    for index, (_, original) in enumerate(pairs):
        for device, copy in copies_of(original).items():
            with tf.device(device):
                by_device.setdefault(device, {})[index] = _digest(copy)
    for device, digests in by_device.items():
        indices = np.array([*digests])
        for index in indices[tf.stack([*digests.values()]).numpy() != first[indices]]:
            variable, original = pairs[index]
            largest, rounding = distance_of_copies(
                original.numpy(), copies_of(original)[device].numpy()
            )
            if not largest <= rounding:
                return Difference(variable, device, largest)
    return None


def distance_of_copies(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Returns the largest difference of two arrays, and how much of it may be rounding.

    Kernels round elements differently at the ends of a device's vectors, in each update.
    """
    is_float = one.dtype.kind in "fV"
    tolerance = float(ml_dtypes.finfo(one.dtype).eps) ** 0.5 if is_float else 0.0
    a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
    with np.errstate(invalid="ignore"):  # of infinite numbers
        difference = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    largest = np.max(np.abs(a), initial=0.0, where=np.isfinite(a))
    return float(np.max(difference, initial=0.0)), tolerance * float(largest)


def _digest(variable: tf.Variable) -> tf.Tensor:
    """Returns the sum of the bits of a variable as integers, int64, computed on its device."""
    value = variable.read_value()
    if value.dtype == tf.bool:
        return tf.math.count_nonzero(value)
    unit = {1: tf.uint8, 2: tf.uint16}.get(value.dtype.size, tf.int32)
    return tf.reduce_sum(tf.cast(tf.bitcast(value, unit), tf.int64))


class FrequentSync:
    """Copies the variables that user code changed to the other devices, before every step.

    Keeps the variables alive.
    """

    def __init__(self, variables: Sequence[keras.Variable], devices: Sequence[str]) -> None:
        self._variables, self._devices = list(variables), list(devices)
        self._changes = ChangesOfVariables([variable.value for variable in variables])
        self._all: Callable[[], Any] | None = None

    def watching(self) -> AbstractContextManager[None]:
        """Returns a context that notes which variables the code inside may change."""
        return self._changes.watching()

    def sync_changed(self) -> None:
        """Copies the variables that may have changed since the last call."""
        changed = [self._variables[number] for number in self._changes.take()]
        if len(changed) <= _FEW:
            sync(changed, self._devices)
        else:
            self.sync_all()

    def sync_all(self) -> None:
        """Copies all variables."""
        if self._all is None:
            # Looking up a concrete function in a tf.function takes as long as copying. Tracing
            # takes as long as a hundred calls of `sync`, so it waits until it is needed.
            function = tf.function(self._sync_all, autograph=False)
            self._all = function.get_concrete_function()
        self._all()

    def _sync_all(self) -> None:
        for variable in self._variables:
            value = variable.value.read_value()
            for device, copy in copies_of(variable.value).items():
                with tf.device(device):
                    copy.assign(value, read_value=False)
