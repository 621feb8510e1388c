"""Other weights and rows for a probe, so that it does not depend on how a training starts.

A value may look like a mean at the first weights, on the first batch, or while a gate is zero.
Therefore probes are repeated with weights and rows that differ from these at random. The random
numbers have seeds of their own: the state of no other generator changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.strategies.batches import has_rows

#: How many perturbations a probe tries. Number 0 leaves everything as it is.
COUNT = 4

#: Noise on a weight, by perturbation: times the weights' standard deviation, and in addition.
_NOISE = ((0.0, 0.0), (0.05, 0.01), (0.5, 0.3), (1.0, 1.0))

#: Fraction of the entries of inputs that are set to zero from the second perturbation on.
_ZEROED = 0.2


def values(
    variables: Iterable[keras.Variable], number: int, fixed: Collection[int] = ()
) -> list[tuple[keras.Variable, tf.Tensor]]:
    """Returns variables with perturbed values.

    Args:
        variables: Those of a model.
        number: Number of the perturbation.
        fixed: Ids of variables that keep their values. All that are not floats do.
    """
    random, (relative, absolute) = np.random.default_rng(number), _NOISE[number]
    found = []
    for variable in variables:
        value = tf.convert_to_tensor(variable)
        if id(variable) not in fixed and value.dtype.is_floating and number:
            size = relative * tf.math.reduce_std(tf.cast(value, tf.float32)) + absolute
            noise = tf.cast(random.normal(size=value.shape), tf.float32) * size
            value += tf.cast(noise, value.dtype)
        found.append((variable, value))
    return found


def batch(structure: Any, number: int) -> Any:
    """Returns other rows with the same shapes: values of the batch in another order, and zeros.

    Args:
        structure: A batch or part of one; other than dense tensors stay as they are.
        number: Number of the perturbation.
    """
    random = np.random.default_rng(100 + number)

    def perturbed(leaf: Any) -> Any:
        if number == 0 or not isinstance(leaf, tf.Tensor) or not has_rows(leaf):
            return leaf
        array = leaf.numpy()
        flat = array.reshape(array.shape[0], -1)
        other = np.stack([random.permutation(column) for column in flat.T], -1)
        other = other.reshape(array.shape) if flat.size else array
        if number > 1 and array.dtype.kind in "iufb":
            other = np.where(random.random(array.shape) < _ZEROED, np.zeros_like(other), other)
        if number > 1 and leaf.dtype.is_floating:
            noise = 0.3 * np.std(array.astype("float64")) * random.normal(size=array.shape)
            other = (other + noise).astype(array.dtype)
        return tf.constant(other, leaf.dtype)

    return tf.nest.map_structure(perturbed, structure)


def cuts(rows: int, number: int) -> tuple[int, int]:
    """Returns the sizes of two parts of some rows: halves, or other parts for a perturbation."""
    if number == 0 or rows < 3:
        return rows // 2, rows - rows // 2
    first = int(np.random.default_rng(200 + number).integers(1, rows))
    return first, rows - first
