"""Values that steps compute, and which of them differ by more than rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.strategies import mirrored_variables

#: A difference may be so many times as large as the changes that rounding errors cause.
_TIMES_ROUNDING = 16
#: Logs that Keras does not have.
_EXTRA_LOGS = {"loss_scale", "skipped_steps"}


class Value(NamedTuple):
    """A value after a step, and before it, by which a change is measured."""

    new: np.ndarray
    old: np.ndarray | float = 0.0


#: What steps have computed, by names that tell the step.
Values = dict[str, Value]


class Difference(NamedTuple):
    """The first value that differs from plain Keras.

    Attributes:
        name: Name of the value.
        size: Largest absolute difference.
        changed: What plain Keras changed it by, or its value if it is a log or an output.
        rounding: The largest difference that rounding explains.
    """

    name: str
    size: float
    changed: float
    rounding: float


def differences(
    result: Values, plain: Values, epsilon: float, spread: Mapping[str, float] | None = None
) -> list[Difference]:
    """Returns the values that differ by more than rounding, in the order of computation.

    Args:
        result: The values to check.
        plain: The right ones.
        epsilon: The rounding error of the number format.
        spread: By how much rounding errors in the weights change the right ones, by name.
    """
    relative = min(800 * epsilon, epsilon**0.5)
    differing = []
    for name, (expected, old) in plain.items():
        new = result[name].new if name in result else np.array(np.nan)
        if not np.issubdtype(expected.dtype, np.number):
            if not np.array_equal(new, expected):
                differing.append(Difference(name, np.inf, 0.0, 0.0))
            continue
        changed = distance(expected, np.asarray(old))
        rounding = 8 * epsilon * _largest(expected) + relative * changed
        rounding = max(rounding, _TIMES_ROUNDING * (spread or {}).get(name, 0.0))
        if not (size := distance(new, expected)) <= rounding:
            differing.append(Difference(name, size, changed, rounding))
    for name in sorted(result.keys() - plain.keys()):
        if not any(f"'{log}'" in name for log in _EXTRA_LOGS):
            differing.append(Difference(name, _largest(result[name].new), 0.0, 0.0))
    return differing


def outputs_of(outputs: Any) -> dict[str, np.ndarray]:
    """Returns the outputs of a prediction, numbered; ragged and sparse ones by their values."""
    leaves = tf.nest.flatten(keras.tree.flatten(outputs), expand_composites=True)
    return {f"output {i}": np.asarray(leaf) for i, leaf in enumerate(leaves)}


def logs_of(logs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns logs with the entries of inner dictionaries, as Keras does."""
    flat: dict[str, np.ndarray] = {}
    for name, value in sorted(logs.items()):
        flat |= logs_of(value) if isinstance(value, Mapping) else {name: np.asarray(value)}
    return flat


def differing_copies(place: str, by_owner: Mapping[str, Sequence[keras.Variable]]) -> Values:
    """Returns by how much variables differ from their mirrored variables, above rounding."""
    values = Values()
    for variables in by_owner.values():
        for variable in variables:
            for device, copy in mirrored_variables.copies_of(variable.value).items():
                values_of_both = np.array(variable.value), copy.numpy()
                size, rounding = mirrored_variables.distance_of_copies(*values_of_both)
                if not size <= rounding:
                    name = f"the copy of {variable.path} on {device} after {place}"
                    values[name] = Value(np.array(size))
    return values


def _largest(array: np.ndarray) -> float:
    return float(np.max(np.abs(np.nan_to_num(np.asarray(array, np.float64))), initial=0.0))


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Returns the largest absolute difference; infinite for other shapes or NaN in one of them."""
    if np.shape(one) != np.shape(other) and np.shape(other) != ():
        return np.inf
    a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return float(np.nan_to_num(np.max(np.where(same, 0.0, np.abs(a - b)), initial=0.0), nan=np.inf))
