"""Probes: values of user code on two parts of some rows, beside those on all of them.

Where the static analysis meets an operation that it does not know, a reduction is inferred from
such values at several perturbations of weights and rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf

from tfdist import devices
from tfdist.errors import UnsupportedModelError
from tfdist.step import batch_norm, perturbation
from tfdist.step.reductions import Reduction, not_reducible
from tfdist.step.scope import Scope
from tfdist.strategies import batches
from tfdist.strategies.batches import num_rows
from tfdist.upstream import keras_model

#: Relative tolerance by compute dtype. It allows for rounding alone: halves of a batch may be
#: nearly alike, and then a product of two means is nearly the mean of two products.
_ROUNDING = {"float64": 1e-9, "float32": 1e-5}
_LESS_PRECISE = 1e-3

#: Most rows of a probe, few enough to be quick.
MAX_ROWS = 64


class ForwardPass:
    """The losses and the changes of state of one forward pass, outside of any graph.

    It runs in a `keras.StatelessScope`: the model does not change.

    Args:
        model: A built model.
        x: Inputs.
        training: As in `Model.call`.
        values: Values of variables.
        fraction: The fraction of the probe's rows that the inputs have.

    Attributes:
        losses: The sum of each loss, in the order in which layers add them.
        changes: Changes of variables, by id, as NumPy arrays.
        rounding: How far rounding may move each of these changes.
    """

    def __init__(
        self,
        model: keras.Model,
        x: Any,
        training: bool,
        values: Sequence[tuple[keras.Variable, tf.Tensor]],
        fraction: float,
    ) -> None:
        self.fraction, before = fraction, {id(v): value for v, value in values}
        with Scope(values, collect_losses=True) as scope:
            model(x, training=training) if keras_model.takes_training(model) else model(x)
        self.losses = [np.sum(keras.ops.convert_to_numpy(loss)) for loss in scope.losses]
        self.changes, self.rounding = {}, {}
        # Hides an outer scope, which has the values of a replica.
        with keras.StatelessScope():
            for variable in scope.updated.values():
                new = np.asarray(scope.get_current_value(variable), np.float64)
                old = before.get(id(variable), variable.value)
                self.changes[id(variable)] = new - np.asarray(old, np.float64)
                self.rounding[id(variable)] = rounding_of_change(variable)


def forward_passes(model: keras.Model, x: Any, training: bool, number: int) -> list[ForwardPass]:
    """Returns the forward passes over two parts of perturbed rows, and over both."""
    fixed = {id(v) for layer in batch_norm.layers_of(model) for v in layer.non_trainable_variables}
    values = perturbation.values(model.variables, number, fixed) if number else []
    parts = probe_rows(x, number)
    total = parts[-1][1]
    rows = perturbation.batch(batches.take(x, 0, total), number)
    return [
        ForwardPass(model, batches.take(rows, *part), training, values, (part[1] - part[0]) / total)
        for part in parts
    ]


def probe_rows(x: Any, number: int = 0) -> list[tuple[int, int]]:
    """Returns the rows of a probe, from and to: the first part, the second, and both.

    Args:
        x: The batch.
        number: Number of the perturbation; 0 for two halves.

    Raises:
        UnsupportedModelError: The batch has one row only.
    """
    half = min(int(num_rows(x)), MAX_ROWS) // 2
    if half == 0:
        raise UnsupportedModelError(
            "A model with embeddings, added losses, or custom states or metrics needs a first "
            "batch of at least 2 rows, from which tfdist infers how to combine the replicas' "
            "values. Use a larger batch_size."
        )
    first, _ = perturbation.cuts(2 * half, number)
    return [(0, first), (first, 2 * half), (0, 2 * half)]


def closest(parts: Sequence[Any], weights: Sequence[float]) -> tuple[Reduction, float, float]:
    """Returns whether the values of two parts are closer to a mean or to a sum over rows.

    Args:
        parts: Values of the first part, the second, and both together; arrays of one shape.
        weights: Each part's fraction of the rows.

    Returns:
        The reduction; the distance from it; and the size to compare that with. Distance and size
        are summed over the elements. With a size of 0 nothing can be inferred.
    """
    first, second, both = (np.asarray(part, np.float64) for part in parts)
    from_mean = np.abs(both - (weights[0] * first + weights[1] * second)).sum()
    from_sum = np.abs(both - (first + second)).sum()
    kind = Reduction.SUM if from_sum < from_mean else Reduction.MEAN
    size = sum(np.abs(part).sum() for part in (first, second, both))
    return kind, float(min(from_mean, from_sum)), float(size)


def inferred(
    what: str,
    passes: Sequence[Sequence[ForwardPass]],
    value_of: Callable[[ForwardPass], Any],
    tolerance: float,
    slack: float = 0.0,
) -> Reduction:
    """Compares the values of two parts with their sum and their mean, at each perturbation."""
    kinds = set()
    for number, parts in enumerate(passes):
        values = [value_of(part) for part in parts]
        if number and not all(np.isfinite(value).all() for value in values):
            continue
        kind, error, size = closest(values, [part.fraction for part in parts[:2]])
        if size == 0:
            continue
        if not error <= tolerance * size + slack:
            raise not_reducible(what)
        kinds.add(kind)
    if not kinds:
        raise UnsupportedModelError(
            f"{what} is zero on the first batch, so tfdist cannot infer whether it is a mean or a "
            "sum over rows. Start from data or weights where it is not zero."
        )
    if len(kinds) > 1:
        raise not_reducible(what)
    return kinds.pop()


def rounding(model: keras.Model) -> float:
    """Returns the relative rounding error of numbers that a model computes."""
    if devices.rounds_float32():
        return _LESS_PRECISE
    dtypes = {layer.compute_dtype for layer in keras_model.flatten_layers(model)}
    floats = [dtype for dtype in dtypes if keras.backend.is_float_dtype(dtype)]
    return max((_ROUNDING.get(dtype, _LESS_PRECISE) for dtype in floats), default=_LESS_PRECISE)


def rounding_of_change(variable: keras.Variable) -> float:
    """Returns how far rounding may move a change of a variable, summed over its elements.

    A small change of a large number is known only to that number's last digits.
    """
    if not keras.backend.is_float_dtype(variable.dtype):
        return 0.0
    eps = float(ml_dtypes.finfo(variable.dtype).eps)
    return 2 * eps * float(np.abs(np.asarray(variable.value, np.float64)).sum())
