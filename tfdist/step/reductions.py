"""How values of shares make the value of the batch, and how closely they have to.

How a value that user code computes from a share adds up over the shares.

A layer's `add_loss`, an activity regulariser and a state that a layer updates are single numbers
or tensors: nothing tells from outside whether they are a mean over the rows or a sum. So they are
asked once, on the first batch: computed for each half of it and for the whole.

What one batch shows of a model: the losses and states of a forward pass, losses, metrics.

Everything runs in a `keras.StatelessScope` and outside of any graph: the model stays as it is.
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
from tfdist.step.parameter_gather import Scope
from tfdist.strategies import batches
from tfdist.strategies.batches import num_rows
from tfdist.upstream import keras_losses, keras_model

#: Relative, by what layers compute in: halves of a batch may be nearly alike, and then a product of
#: two means is nearly the mean of two products. Only rounding is let pass.
_ROUNDING = {"float64": 1e-9, "float32": 1e-5}
_LESS_PRECISE = 1e-3


class Reduction(enum.Enum):
    """How values of shares make the value of the batch."""

    MEAN = "mean"  # weighted by rows; what does not depend on the rows at all is one of these
    SUM = "sum"
    SAME = "same"  # on every share


def closest(parts: Sequence[Any], weights: Sequence[float]) -> tuple[Reduction, float, float]:
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
    which = Reduction.SUM if from_sum < from_mean else Reduction.MEAN
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


#: How far a probe of random layers may be off: other rows, other draws.
_RANDOM = 0.2


class ReductionProbe:
    """Answers, for one model, how its added losses and updated states add up.

    Args:
        model: Built.
        first_batch: Returns the first global batch; called outside of any graph, and only for a
            model with something to ask about.
    """

    def __init__(self, model: keras.Model, first_batch: Callable[[], Any]) -> None:
        self._model, self._first_batch = model, first_batch
        self._probes: dict[bool, list[ProbePass]] = {}
        self._compiled: list[CompiledLoss] = []
        self._whole_metrics: frozenset[int] | None = None

    def loss_reductions(self, num_losses: int, training: bool) -> list[Reduction]:
        """Returns how each added loss adds up, in the order in which the layers add them.

        Raises:
            UnsupportedModelError: One is neither a mean nor a sum over rows.
        """
        # Without random layers the probe is exact; what only training adds is probed there.
        for mode in (False, training):
            probes = self._run(mode)
            drawn = mode and keras_model.seeds_of(self._model)
            tolerance = _RANDOM if drawn else rounding(self._model)
            if len(probes[0].losses) == num_losses:
                values = zip(*(p.losses for p in probes), strict=True)
                return [
                    _compared(f"add_loss number {i}", v, tolerance) for i, v in enumerate(values)
                ]
        raise UnsupportedModelError(
            f"The layers add {num_losses} losses in training, but {len(probes[0].losses)} when "
            "called again: a loss that comes and goes cannot be split; use one device."
        )

    def state_reduction(self, variable: keras.Variable) -> Reduction:
        """Returns how what the forward pass adds to a variable adds up.

        Raises:
            UnsupportedModelError: It is neither a mean nor a sum over rows.
        """
        probes = self._run(True)
        if id(variable) not in probes[0].states:
            raise UnsupportedModelError(
                f"The update of {variable.path!r} is not the model's call's, so it is not known "
                "how those of shares add up: make it in call, or use one device."
            )
        changes = [p.states[id(variable)] for p in probes]
        tolerance = _RANDOM if keras_model.seeds_of(self._model) else rounding(self._model)
        what = f"The update of {variable.path!r}"
        return _compared(what, changes, tolerance, probes[0].lost[id(variable)])

    def full_batch_metrics(self) -> frozenset[int]:
        """Returns the ids of the metrics' variables, if they have to see whole batches.

        It returns none where what each batch adds to them is a sum over its rows, which holds for
        Keras's own.
        """
        if self._whole_metrics is None:
            own = has_own_metrics(self._model)
            self._whole_metrics = frozenset(self._probe_metrics() if own else ())
        return self._whole_metrics

    def _probe_metrics(self) -> set[int]:
        """Updates the metrics with the first half of the rows, the second, and both."""
        with tf.init_scope():
            x, y, weight = keras.utils.unpack_x_y_sample_weight(self._first_batch())
            with keras.StatelessScope():
                y_pred = self._model(x, training=False)
            rows = (x, y, y_pred, weight)
            first, second, both = (
                metric_changes(self._model, batches.take(rows, *part)) for part in halves(x)
            )
        added = {key: first.get(key, 0) + second.get(key, 0) for key in both}
        rtol = rounding(self._model)
        close = (np.allclose(added[key], value, rtol) for key, value in both.items())
        return set() if all(close) else set(both)

    def has_independent_rows(self, number: int) -> bool:
        """Tells whether a compiled loss gives each row a value that no other row moves.

        Args:
            number: Its place among the losses of the model.
        """
        compile_loss = keras_losses.compile_loss(self._model)
        if is_row_by_row(keras_losses.compiled_losses(compile_loss)[number]):
            return True
        with tf.init_scope():
            if not self._compiled:
                self._compiled = compiled_losses(self._model, self._first_batch())
            loss, y_true, y_pred = self._compiled[number]
            half = (int(num_rows(y_pred)) + 1) // 2
            some = loss.call(batches.take(y_true, 0, half), batches.take(y_pred, 0, half))
            rtol = rounding(self._model)
            return np.allclose(some, loss.call(y_true, y_pred)[:half], rtol, atol=1e-6)

    def _run(self, training: bool) -> list[ProbePass]:
        """Probes the first half of the rows, the second, and both."""
        if training not in self._probes:
            with tf.init_scope():
                x = keras.utils.unpack_x_y_sample_weight(self._first_batch())[0]
                self._probes[training] = [
                    ProbePass(self._model, batches.take(x, *part), training) for part in halves(x)
                ]
        return self._probes[training]


def _compared(what: str, values: Sequence[Any], tolerance: float, slack: float = 0.0) -> Reduction:
    """Compares the value for the first and second half together with their sum and their mean."""
    which, error, size = closest(values, (0.5, 0.5))
    if size == 0:
        raise UnsupportedModelError(
            f"{what} is zero on the first batch, which does not tell whether it is a mean or a "
            "sum over rows: start from data or weights where it is not."
        )
    if error <= tolerance * size + slack:
        return which
    raise UnsupportedModelError(
        f"{what} is neither a mean nor a sum over rows, so replicas cannot compute it on their "
        "shares: override compute_loss, which sees the whole batch, or use one device."
    )


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


class ProbePass:
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
