"""What one batch shows of a model: the losses and states of a forward pass, losses, metrics.

Everything runs in a `keras.StatelessScope` and outside of any graph: the model stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.step.aggregation import lost
from tfdist.step.scope import Scope
from tfdist.strategies.row_counts import num_rows
from tfdist.upstream import keras_losses

#: Rows of the probe at most: enough for a random layer's mean, few enough to be quick.
MAX_ROWS = 64

#: A compiled loss, with the labels and outputs of the first batch that go to it.
CompiledLoss = tuple[keras.losses.Loss, Any, Any]


def halves(x: Any) -> list[tuple[int, int]]:
    """Returns the rows of a probe, from and to: the first half, the second, and both.

    Raises:
        UnsupportedModelError: There is one row only.
    """
    half = min(int(num_rows(x)), MAX_ROWS) // 2
    if half == 0:
        raise UnsupportedModelError(
            "A model with embeddings, added losses, states or metrics of its own needs a first "
            "batch of 2 rows or more, on which to see how they add up."
        )
    return [(0, half), (half, 2 * half), (0, 2 * half)]


class Probe:
    """What one forward pass adds as losses and changes in the states.

    Attributes:
        losses: Sums, as the layers add them.
        states: Changes of variables, by their ids, as NumPy arrays.
        lost: What rounding may take from each of those.
    """

    def __init__(self, model: keras.Model, x: Any, training: bool) -> None:
        with Scope(collect_losses=True) as scope:
            model(x, training=training)
        self.losses = [np.sum(keras.ops.convert_to_numpy(loss)) for loss in scope.losses]
        self.states, self.lost = {}, {}
        with keras.StatelessScope():  # not one around the question, which has a replica's values
            for variable in scope.updated.values():
                new = np.asarray(scope.get_current_value(variable), np.float64)
                self.states[id(variable)] = new - np.asarray(variable.value, np.float64)
                self.lost[id(variable)] = lost(variable)


def metric_changes(model: keras.Model, rows: Any) -> dict[int, Any]:
    """Returns what a batch adds to the metrics' variables, by their ids.

    Args:
        model: Compiled.
        rows: Inputs, labels, outputs and weights of the batch.
    """
    states = model.metrics_variables
    start = [(v, tf.zeros(v.shape, v.dtype)) for v in states]
    x, y, y_pred, weight = rows
    with keras.StatelessScope(start) as scope:
        model.compute_metrics(x, y, y_pred, sample_weight=weight)
    ends = [(v, scope.get_current_value(v), zeros) for v, zeros in start]
    return {id(v): np.asarray(end, np.float64) for v, end, zeros in ends if end is not zeros}


def is_row_by_row(loss: keras.losses.Loss) -> bool:
    """Tells whether a loss is one of Keras's, which treat each row by itself (but for Circle)."""
    function = getattr(loss, "fn", type(loss))  # what a LossFunctionWrapper wraps
    ours = function.__module__.startswith("keras.src.losses")
    return ours and function is not keras.losses.circle


def has_own_metrics(model: keras.Model) -> bool:
    """Tells whether a metric, or how they are computed, is not Keras's own."""
    if type(model).compute_metrics is not keras.Model.compute_metrics:
        return True
    # A MeanMetricWrapper is as Keras's own as the function that it wraps.
    sources = [keras_losses.function_of(metric) for metric in keras_losses.compiled_metrics(model)]
    return not all(s.__module__.startswith("keras.src.") for s in sources)


def compiled_losses(model: keras.Model, batch: Any) -> list[CompiledLoss]:
    """Returns the compiled losses with the labels and outputs of a batch that go to each."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    found: list[CompiledLoss] = []

    def recorder(loss: keras.losses.Loss) -> Callable[..., tf.Tensor]:
        def record(y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
            found.append((loss, tf.convert_to_tensor(y_true), tf.convert_to_tensor(y_pred)))
            return tf.zeros(())

        return record

    with keras.StatelessScope():  # trackers and states stay as they are
        y_pred = model(x, training=False)
        compile_loss = keras_losses.compile_loss(model)
        recorders = [recorder(loss) for loss in keras_losses.compiled_losses(compile_loss)]
        keras_losses.compile_loss_of(compile_loss, recorders)(y, y_pred, sample_weight)
    return found
