"""Reduction inference: whether values of user code are a mean or a sum over rows.

A layer's `add_loss`, an activity regularizer, and a state that a layer updates are numbers or
tensors that do not tell whether they are a mean or a sum over the rows. So they are probed once, on
the first batch: computed for each half of it, and for both halves together.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf

from tfdist import devices
from tfdist.errors import UnsupportedModelError
from tfdist.step.scope import Scope
from tfdist.strategies import batches
from tfdist.strategies.batches import num_rows
from tfdist.upstream import keras_losses, keras_model

#: Relative tolerance by compute dtype. It allows for rounding alone: halves of a batch may be
#: nearly alike, and then a product of two means is nearly the mean of two products.
_ROUNDING = {"float64": 1e-9, "float32": 1e-5}
_LESS_PRECISE = 1e-3

#: Relative tolerance for random layers, which draw other numbers for other rows.
_RANDOM = 0.2

#: Most rows of a probe: enough for the mean of a random layer, few enough to be quick.
MAX_ROWS = 64

#: A compiled loss, with the labels and outputs of the first batch that it takes.
CompiledLoss = tuple[keras.losses.Loss, Any, Any]


class Reduction(enum.Enum):
    """How the values of replicas combine to the value of the global batch."""

    MEAN = "mean"  # weighted by rows; also for a value that does not depend on the rows
    SUM = "sum"
    SAME = "same"  # on every replica


class ReductionProbe:
    """Infers the reductions of one model's added losses, updated states, losses, and metrics.

    Args:
        model: Built.
        first_batch: Returns the first global batch. Called outside of any graph, and only for a
            model that has something to probe.
    """

    def __init__(self, model: keras.Model, first_batch: Callable[[], Any]) -> None:
        self._model, self._first_batch = model, first_batch
        self._passes: dict[bool, list[_ForwardPass]] = {}
        self._compiled: list[CompiledLoss] = []
        self._full_batch_metrics: frozenset[int] | None = None

    def loss_reductions(self, num_losses: int, training: bool) -> list[Reduction]:
        """Returns the reduction of each added loss, in the order in which layers add them.

        Raises:
            UnsupportedModelError: A loss is neither a mean nor a sum over rows.
        """
        # Without random layers the probe is exact. Losses that only training adds are probed there.
        for mode in (False, training):
            passes = self._forward_passes(mode)
            is_random = mode and keras_model.seeds_of(self._model)
            tolerance = _RANDOM if is_random else rounding(self._model)
            if len(passes[0].losses) == num_losses:
                values = zip(*(one.losses for one in passes), strict=True)
                return [
                    _inferred(f"add_loss number {i}", v, tolerance) for i, v in enumerate(values)
                ]
        raise UnsupportedModelError(
            f"The layers add {num_losses} losses in training, but {len(passes[0].losses)} when "
            "called again. Replicas cannot split a loss that is added in some calls only. Add it "
            "in every call, or use one device."
        )

    def state_reduction(self, variable: keras.Variable) -> Reduction:
        """Returns the reduction of the change that a forward pass makes to a variable.

        Raises:
            UnsupportedModelError: The change is neither a mean nor a sum over rows.
        """
        passes = self._forward_passes(True)
        if id(variable) not in passes[0].changes:
            raise UnsupportedModelError(
                f"{variable.path!r} is not updated by the model's call, so tfdist cannot infer how "
                "to combine the updates of replicas. Update it in call, or use one device."
            )
        changes = [one.changes[id(variable)] for one in passes]
        tolerance = _RANDOM if keras_model.seeds_of(self._model) else rounding(self._model)
        slack = passes[0].rounding[id(variable)]
        return _inferred(f"The update of {variable.path!r}", changes, tolerance, slack)

    def full_batch_metrics(self) -> frozenset[int]:
        """Returns the ids of the metrics' variables, if the metrics need full batches.

        The result is empty where each batch adds a sum over its rows to the metrics, as Keras's
        own metrics do.
        """
        if self._full_batch_metrics is None:
            is_custom = _has_custom_metrics(self._model)
            self._full_batch_metrics = frozenset(self._probe_metrics() if is_custom else ())
        return self._full_batch_metrics

    def has_independent_rows(self, number: int) -> bool:
        """Tells whether a compiled loss computes each row's value from that row alone.

        Args:
            number: Place of the loss among the compiled losses of the model.
        """
        compile_loss = keras_losses.compile_loss(self._model)
        if _is_row_by_row(keras_losses.compiled_losses(compile_loss)[number]):
            return True
        with tf.init_scope():
            if not self._compiled:
                self._compiled = _compiled_losses(self._model, self._first_batch())
            loss, y_true, y_pred = self._compiled[number]
            half = (int(num_rows(y_pred)) + 1) // 2
            some = loss.call(batches.take(y_true, 0, half), batches.take(y_pred, 0, half))
            rtol = rounding(self._model)
            return np.allclose(some, loss.call(y_true, y_pred)[:half], rtol, atol=1e-6)

    def _probe_metrics(self) -> set[int]:
        """Updates the metrics with the first half of the rows, the second, and both."""
        with tf.init_scope():
            x, y, weight = keras.utils.unpack_x_y_sample_weight(self._first_batch())
            with keras.StatelessScope():
                y_pred = self._model(x, training=False)
            rows = (x, y, y_pred, weight)
            first, second, both = (
                _metric_changes(self._model, batches.take(rows, *part)) for part in probe_rows(x)
            )
        added = {key: first.get(key, 0) + second.get(key, 0) for key in both}
        rtol = rounding(self._model)
        close = (np.allclose(added[key], value, rtol) for key, value in both.items())
        return set() if all(close) else set(both)

    def _forward_passes(self, training: bool) -> list[_ForwardPass]:
        """Returns the forward passes over the first half of the rows, the second, and both."""
        if training not in self._passes:
            with tf.init_scope():
                x = keras.utils.unpack_x_y_sample_weight(self._first_batch())[0]
                self._passes[training] = [
                    _ForwardPass(self._model, batches.take(x, *part), training)
                    for part in probe_rows(x)
                ]
        return self._passes[training]


class _ForwardPass:
    """The losses and the changes of state of one forward pass, outside of any graph.

    It runs in a `keras.StatelessScope`: the model does not change.

    Attributes:
        losses: The sum of each loss, in the order in which layers add them.
        changes: Changes of variables, by id, as NumPy arrays.
        rounding: How far rounding may move each of these changes.
    """

    def __init__(self, model: keras.Model, x: Any, training: bool) -> None:
        with Scope(collect_losses=True) as scope:
            model(x, training=training)
        self.losses = [np.sum(keras.ops.convert_to_numpy(loss)) for loss in scope.losses]
        self.changes, self.rounding = {}, {}
        # Hides an outer scope, which has the values of a replica.
        with keras.StatelessScope():
            for variable in scope.updated.values():
                new = np.asarray(scope.get_current_value(variable), np.float64)
                self.changes[id(variable)] = new - np.asarray(variable.value, np.float64)
                self.rounding[id(variable)] = rounding_of_change(variable)


def probe_rows(x: Any) -> list[tuple[int, int]]:
    """Returns the rows of a probe, from and to: the first half, the second, and both.

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
    return [(0, half), (half, 2 * half), (0, 2 * half)]


def closest(parts: Sequence[Any], weights: Sequence[float]) -> tuple[Reduction, float, float]:
    """Tells whether the values of two parts are closer to a mean or to a sum over rows.

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


def _inferred(what: str, values: Sequence[Any], tolerance: float, slack: float = 0.0) -> Reduction:
    """Compares the values of two halves with their sum and their mean."""
    kind, error, size = closest(values, (0.5, 0.5))
    if size == 0:
        raise UnsupportedModelError(
            f"{what} is zero on the first batch, so tfdist cannot infer whether it is a mean or a "
            "sum over rows. Start from data or weights where it is not zero."
        )
    if error <= tolerance * size + slack:
        return kind
    raise UnsupportedModelError(
        f"{what} is neither a mean nor a sum over rows, so replicas cannot compute it from their "
        "rows. Override compute_loss, which gets the full batch, or use one device."
    )


def _metric_changes(model: keras.Model, rows: Any) -> dict[int, Any]:
    """Returns what a batch adds to the metrics' variables, by id.

    Args:
        model: Compiled.
        rows: Inputs, labels, outputs, and weights of the batch.
    """
    states = model.metrics_variables
    start = [(v, tf.zeros(v.shape, v.dtype)) for v in states]
    x, y, y_pred, weight = rows
    with keras.StatelessScope(start) as scope:
        model.compute_metrics(x, y, y_pred, sample_weight=weight)
    ends = [(v, scope.get_current_value(v), zeros) for v, zeros in start]
    return {id(v): np.asarray(end, np.float64) for v, end, zeros in ends if end is not zeros}


def _is_row_by_row(loss: keras.losses.Loss) -> bool:
    """Tells whether a loss is Keras's; those treat each row by itself, except for Circle."""
    function = getattr(loss, "fn", type(loss))  # what a LossFunctionWrapper wraps
    is_of_keras = function.__module__.startswith("keras.src.losses")
    return is_of_keras and function is not keras.losses.circle


def _has_custom_metrics(model: keras.Model) -> bool:
    """Tells whether a metric, or the computation of metrics, is not Keras's own."""
    if type(model).compute_metrics is not keras.Model.compute_metrics:
        return True
    # A MeanMetricWrapper is Keras's own if the function that it wraps is.
    sources = [keras_losses.function_of(metric) for metric in keras_losses.compiled_metrics(model)]
    return not all(s.__module__.startswith("keras.src.") for s in sources)


def _compiled_losses(model: keras.Model, batch: Any) -> list[CompiledLoss]:
    """Returns the compiled losses with the labels and outputs of a batch that each takes."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    found: list[CompiledLoss] = []

    def recorder(loss: keras.losses.Loss) -> Callable[..., tf.Tensor]:
        def record(y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
            found.append((loss, tf.convert_to_tensor(y_true), tf.convert_to_tensor(y_pred)))
            return tf.zeros(())

        return record

    with keras.StatelessScope():  # trackers and states do not change
        y_pred = model(x, training=False)
        compile_loss = keras_losses.compile_loss(model)
        recorders = [recorder(loss) for loss in keras_losses.compiled_losses(compile_loss)]
        keras_losses.compile_loss_of(compile_loss, recorders)(y, y_pred, sample_weight)
    return found
