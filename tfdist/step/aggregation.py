"""How values of shares make the value of the batch, and how closely they have to."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import keras
import ml_dtypes
import numpy as np

from tfdist import devices
from tfdist.upstream import keras_model

#: Relative, by what layers compute in: halves of a batch may be nearly alike, and then a product of
#: two means is nearly the mean of two products. Only rounding is let pass.
_ROUNDING = {"float64": 1e-9, "float32": 1e-5}
_LESS_PRECISE = 1e-3


class Aggregation(enum.Enum):
    """How values of shares make the value of the batch."""

    MEAN = "mean"  # weighted by rows; what does not depend on the rows at all is one of these
    SUM = "sum"
    SAME = "same"  # on every share


def closest(parts: Sequence[Any], weights: Sequence[float]) -> tuple[Aggregation, float, float]:
    """Tells whether two parts' values are nearer to a mean or to a sum over rows.

    Args:
        parts: Values of the first part, the second, and both together; arrays of one shape.
        weights: Each part's share of the rows.

    Returns:
        Which; how far the parts are off, and the size to compare that with, both summed over
        the elements. A size of 0 does not tell.
    """
    first, second, both = (np.asarray(part, np.float64) for part in parts)
    from_mean = np.abs(both - (weights[0] * first + weights[1] * second)).sum()
    from_sum = np.abs(both - (first + second)).sum()
    which = Aggregation.SUM if from_sum < from_mean else Aggregation.MEAN
    size = sum(np.abs(part).sum() for part in (first, second, both))
    return which, float(min(from_mean, from_sum)), float(size)


def rounding(model: keras.Model) -> float:
    """Returns how far a number that a model computes may be off, relative to it."""
    if devices.rounds_float32():
        return _LESS_PRECISE
    dtypes = {layer.compute_dtype for layer in keras_model.flatten_layers(model)}
    floats = [dtype for dtype in dtypes if keras.backend.is_float_dtype(dtype)]
    return max((_ROUNDING.get(dtype, _LESS_PRECISE) for dtype in floats), default=_LESS_PRECISE)


def lost(variable: keras.Variable) -> float:
    """Returns what rounding may take from a change of a variable, summed over its elements.

    A small change of a large number is known to that number's last digits only.
    """
    if not keras.backend.is_float_dtype(variable.dtype):
        return 0.0
    eps = float(ml_dtypes.finfo(variable.dtype).eps)
    return 2 * eps * float(np.abs(np.asarray(variable.value, np.float64)).sum())
