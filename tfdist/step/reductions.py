"""Reduction inference: whether values of user code are a mean or a sum over rows.

A layer's `add_loss`, an activity regularizer, and a state that a layer updates are numbers or
tensors that do not tell whether they are a mean or a sum over the rows. The static analysis of the
traced forward pass (`row_analysis.py`) decides that where it knows all operations. What it does not
know is probed: computed for each of two parts of a batch, and for both together, at several
perturbations of weights and rows.
"""

from __future__ import annotations

import collections
import enum
import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf

from tfdist import devices
from tfdist.errors import UnsupportedModelError
from tfdist.step import batch_norm, perturbation
from tfdist.step.equal_draws import draws_alike_for_all_rows
from tfdist.step.row_analysis import RowAnalysis
from tfdist.step.row_dependence import FREE, MIXED, UNKNOWN, Dependence, Kind
from tfdist.step.scope import Scope
from tfdist.step.traced_forward import TracedForward, change_is_sum
from tfdist.strategies import batches
from tfdist.strategies.batches import num_rows
from tfdist.upstream import keras_losses, keras_model

logger = logging.getLogger(__name__)

#: Relative tolerance by compute dtype. It allows for rounding alone: halves of a batch may be
#: nearly alike, and then a product of two means is nearly the mean of two products.
_ROUNDING = {"float64": 1e-9, "float32": 1e-5}
_LESS_PRECISE = 1e-3

#: Most rows of a probe, few enough to be quick.
MAX_ROWS = 64

#: How what a replica computes can be combined: by the static analysis, by probes, or not at all.
DECISIONS: collections.Counter[str] = collections.Counter()


class Reduction(enum.Enum):
    """How the values of replicas combine to the value of the global batch."""

    MEAN = "mean"  # weighted by rows; also for a value that does not depend on the rows
    SUM = "sum"
    SAME = "same"  # on every replica


class ReductionProbe:
    """Infers the reductions of one model's added losses, updated states, losses, and metrics.

    Args:
        model: A built model.
        first_batch: Returns the first global batch. Called outside of any graph, and only for a
            model that has something to probe.
    """

    def __init__(self, model: keras.Model, first_batch: Callable[[], Any]) -> None:
        self._model, self._first_batch = model, functools.cache(first_batch)
        self._traced: dict[bool, TracedForward | None] = {}
        self._passes: dict[bool, list[list[_ForwardPass]]] = {}
        self._independent: dict[int, bool] = {}
        self._full_batch_metrics: frozenset[int] | None = None

    def loss_reductions(self, num_losses: int, training: bool) -> list[Reduction]:
        """Returns the reduction of each added loss, in the order in which layers add them.

        Raises:
            UnsupportedModelError: A loss is neither a mean nor a sum over rows.
        """
        traced = self.traced(training)
        if traced is not None and len(traced.losses) == num_losses:
            values = [traced.analysis.of(loss) for loss in traced.losses]
            kinds = [
                _decided(f"add_loss number {i}", reduction_of(value))
                for i, value in enumerate(values)
            ]
        else:
            kinds = [None] * num_losses
        found = [kind for kind in kinds if kind is not None]
        return found if len(found) == num_losses else self._probe_losses(kinds, training)

    def _probe_losses(self, kinds: list[Reduction | None], training: bool) -> list[Reduction]:
        for mode in (training, False):  # a loss that the analysis cannot trace may need the other
            passes = self._forward_passes(mode)
            if len(passes[0][0].losses) == len(kinds):
                return [
                    kind or _inferred(f"add_loss number {i}", passes, _loss_number(i), self._rtol)
                    for i, kind in enumerate(kinds)
                ]
        num_found = len(self._forward_passes(False)[0][0].losses)
        raise UnsupportedModelError(
            f"The layers add {len(kinds)} losses in training, but {num_found} when called again. "
            "Replicas cannot split a loss that is added in some calls only. Add it in every call, "
            "or use one device."
        )

    def state_reduction(self, variable: keras.Variable) -> Reduction:
        """Returns the reduction of the change that a forward pass makes to a variable.

        Raises:
            UnsupportedModelError: The change is neither a mean nor a sum over rows.
        """
        what = f"The update of {variable.path!r}"
        if (traced := self.traced(True)) is not None:
            for changed, start, new in traced.changed:
                found = reduction_of_change(traced.analysis, start, new)
                if changed is variable and (kind := _decided(what, found)):
                    return kind
        passes = self._forward_passes(True)
        if id(variable) not in passes[0][0].changes:
            raise UnsupportedModelError(
                f"{variable.path!r} is not updated by the model's call, so tfdist cannot infer how "
                "to combine the updates of replicas. Update it in call, or use one device."
            )
        slack = passes[0][0].rounding[id(variable)]
        return _inferred(what, passes, lambda one: one.changes[id(variable)], self._rtol, slack)

    def full_batch_metrics(self) -> frozenset[int]:
        """Returns the ids of the metrics' variables, if the metrics need full batches.

        The result is empty where each batch adds a sum over its rows to the metrics, as Keras's
        own metrics do.
        """
        if self._full_batch_metrics is None:
            is_custom = _has_custom_metrics(self._model)
            self._full_batch_metrics = self._find_full_batch_metrics() if is_custom else frozenset()
        return self._full_batch_metrics

    def has_independent_rows(self, number: int, y_true: Any, y_pred: Any) -> bool:
        """Returns whether a compiled loss computes each row's value from that row alone.

        Args:
            number: Place of the loss among the compiled losses of the model.
            y_true: Labels as it takes them, for their shapes and dtypes.
            y_pred: Outputs as it takes them.
        """
        compile_loss = keras_losses.compile_loss(self._model)
        loss = keras_losses.compiled_losses(compile_loss)[number]
        if _is_row_by_row(loss):
            return True
        if number not in self._independent:
            with tf.init_scope():
                self._independent[number] = _has_independent_rows(
                    self._model, loss, (y_true, y_pred), self._rtol
                )
        return self._independent[number]

    def traced(self, training: bool) -> TracedForward | None:
        """Returns the traced forward pass; None if it cannot be analyzed."""
        if training not in self._traced:
            with tf.init_scope():
                x = keras.utils.unpack_x_y_sample_weight(self._first_batch())[0]
                self._traced[training] = traced_or_none(self._model, x, training)
        return self._traced[training]

    @property
    def _rtol(self) -> float:
        return rounding(self._model)

    def _find_full_batch_metrics(self) -> frozenset[int]:
        with tf.init_scope():
            batch = keras.utils.unpack_x_y_sample_weight(self._first_batch())
            found, updated = _traced_metrics(self._model, batch)
            if found is not UNKNOWN:
                DECISIONS["analysis"] += 1
                return frozenset() if found is FREE else updated
            DECISIONS["probe"] += 1
            with keras.StatelessScope():
                y_pred = self._model(batch[0], training=False)
            x, y, weight = batch
            for number in range(perturbation.COUNT):
                if updated := self._not_adding_up((x, y, y_pred, weight), number):
                    return updated
            return frozenset()

    def _not_adding_up(self, rows: Any, number: int) -> frozenset[int]:
        """Returns the metrics' variables unless the changes by two parts of some rows add up."""
        x, y, y_pred, weight = rows
        rows = (x, *perturbation.batch((y, y_pred, weight), number))
        parts = [batches.take(rows, *part) for part in probe_rows(rows, number)]
        first, second, both = (_metric_changes(self._model, part) for part in parts)
        if number and not all(np.isfinite(value).all() for value in both.values()):
            return frozenset()  # nothing can be told from this perturbation
        added = {key: first.get(key, 0) + second.get(key, 0) for key in both}
        is_sum = all(np.allclose(added[key], value, self._rtol) for key, value in both.items())
        return frozenset() if is_sum else frozenset(both)

    def _forward_passes(self, training: bool) -> list[list[_ForwardPass]]:
        """Returns the forward passes over two parts of the rows, and both, by perturbation."""
        if training not in self._passes:
            DECISIONS["probe"] += 1
            with tf.init_scope(), draws_alike_for_all_rows():
                x = keras.utils.unpack_x_y_sample_weight(self._first_batch())[0]
                passes = [_forward_passes(self._model, x, training, 0)]
                for number in range(1, perturbation.COUNT):
                    with suppress(Exception):  # other rows may be invalid to the model
                        passes.append(_forward_passes(self._model, x, training, number))
                self._passes[training] = passes
        return self._passes[training]


def traced_or_none(model: keras.Model, x: Any, training: bool) -> TracedForward | None:
    """Returns the traced forward pass of a model; None if it cannot be analyzed.

    A model with `run_eagerly=True` is not traced: its code may work outside of graphs only.
    """
    if getattr(model, "run_eagerly", False):
        return None
    try:
        return TracedForward(model, x, training)
    except ValueError as error:
        logger.info("No static analysis: %s", error)
        return None


def reduction_of(value: Dependence) -> Reduction | Dependence:
    """Returns the reduction of the sum over the elements of a value, or MIXED or UNKNOWN."""
    if value.is_mean:
        return Reduction.MEAN
    if value.is_sum or (value.kind is Kind.ROWS and value.power == 0):
        return Reduction.SUM
    is_mixed = value.kind is Kind.MIXED or (value.kind in (Kind.ROWS, Kind.SUMMED) and value.power)
    return MIXED if is_mixed else UNKNOWN


def reduction_of_change(
    analysis: RowAnalysis, start: tf.Tensor | None, new: tf.Tensor
) -> Reduction | Dependence:
    """Returns the reduction of a variable's change, or MIXED or UNKNOWN.

    Args:
        analysis: Analysis of the graph.
        start: The variable's value before the change; None if that is not known.
        new: Its value after it.
    """
    value = analysis.of(new)
    if value.is_mean:
        return Reduction.MEAN
    change = change_is_sum(analysis, start, new)
    if change is FREE:
        return Reduction.SUM
    return MIXED if value.kind is Kind.MIXED and change is not UNKNOWN else UNKNOWN


def _decided(what: str, found: Reduction | Dependence) -> Reduction | None:
    """Returns a reduction that the analysis found; None if it found none.

    Raises:
        UnsupportedModelError: The value is neither a mean nor a sum over rows.
    """
    if found is UNKNOWN:
        return None
    DECISIONS["analysis"] += 1
    if not isinstance(found, Reduction):
        raise _not_reducible(what)
    return found


def _traced_metrics(
    model: keras.Model, batch: tuple[Any, Any, Any]
) -> tuple[Dependence, frozenset[int]]:
    """Analyzes the updates of the metrics.

    Returns:
        FREE if they are sums over rows, MIXED if not, or UNKNOWN; and the ids of the variables.
    """
    states = model.metrics_variables
    updates: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}

    def compute(tensors: Any) -> None:
        x, y, y_pred, weight = tensors
        start = [(v, tf.identity(tf.zeros(v.shape, v.dtype))) for v in states]
        with keras.StatelessScope(start) as scope:
            model.compute_metrics(x, y, y_pred, sample_weight=weight)
        ends = [(id(v), first, scope.get_current_value(v)) for v, first in start]
        updates.update({key: (first, new) for key, first, new in ends if new is not first})

    try:
        with keras.StatelessScope():
            y_pred = model(batch[0], training=False)
        rows = (batch[0], batch[1], y_pred, batch[2])
        traced = TracedForward(model, rows, training=False, compute=compute)
    except ValueError as error:
        logger.info("No static analysis of metrics: %s", error)
        return UNKNOWN, frozenset()
    found = [change_is_sum(traced.analysis, *update) for update in updates.values()]
    return worst_decision(found), frozenset(updates)


def worst_decision(found: Sequence[Dependence]) -> Dependence:
    """Returns MIXED if one of several decisions is, UNKNOWN if one is that, or else FREE."""
    return MIXED if MIXED in found else UNKNOWN if UNKNOWN in found else FREE


def _has_independent_rows(
    model: keras.Model, loss: keras.losses.Loss, examples: tuple[Any, Any], rtol: float
) -> bool:
    """Returns whether each of a loss's values is computed from its row alone."""
    try:
        rows = tf.nest.map_structure(_sample, examples)
        traced = TracedForward(model, rows, training=True, compute=lambda pair: loss.call(*pair))
        (value,) = [traced.analysis.of(t) for t in traced.outputs]
        if value.is_row_wise or value.kind not in (Kind.UNKNOWN, Kind.LIST):
            DECISIONS["analysis"] += 1
            return value.is_row_wise
    except ValueError as error:
        logger.info("No static analysis of the loss: %s", error)
    DECISIONS["probe"] += 1
    with keras.StatelessScope(), draws_alike_for_all_rows():  # the loss's seed must not move
        found = [_computes_rows_alone(loss, examples, n, rtol) for n in range(perturbation.COUNT)]
    return all(each is not False for each in found) and True in found


def _sample(tensor: Any) -> tf.Tensor:
    """Returns two rows with the shape and dtype of a tensor, all ones."""
    shape = [2, *(3 if length is None else length for length in tensor.shape[1:])]
    return tf.ones(shape, tensor.dtype)


class _ForwardPass:
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


def _forward_passes(model: keras.Model, x: Any, training: bool, number: int) -> list[_ForwardPass]:
    """Returns the forward passes over two parts of perturbed rows, and over both."""
    fixed = {id(v) for layer in batch_norm.layers_of(model) for v in layer.non_trainable_variables}
    values = perturbation.values(model.variables, number, fixed) if number else []
    parts = probe_rows(x, number)
    total = parts[-1][1]
    rows = perturbation.batch(batches.take(x, 0, total), number)
    return [
        _ForwardPass(
            model, batches.take(rows, *part), training, values, (part[1] - part[0]) / total
        )
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


def _inferred(
    what: str,
    passes: Sequence[Sequence[_ForwardPass]],
    value_of: Callable[[_ForwardPass], Any],
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
            raise _not_reducible(what)
        kinds.add(kind)
    if not kinds:
        raise UnsupportedModelError(
            f"{what} is zero on the first batch, so tfdist cannot infer whether it is a mean or a "
            "sum over rows. Start from data or weights where it is not zero."
        )
    if len(kinds) > 1:
        raise _not_reducible(what)
    return kinds.pop()


def _not_reducible(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{what} is neither a mean nor a sum over rows, so replicas cannot compute it from their "
        "rows. Override compute_loss, which gets the full batch, or use one device."
    )


def _loss_number(number: int) -> Callable[[_ForwardPass], Any]:
    return lambda one: one.losses[number]


def _metric_changes(model: keras.Model, rows: Any) -> dict[int, Any]:
    """Returns what a batch adds to the metrics' variables, by id.

    Args:
        model: A compiled model.
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
    """Returns whether a loss is Keras's; those treat each row by itself, except for Circle."""
    function = getattr(loss, "fn", type(loss))  # what a LossFunctionWrapper wraps
    is_of_keras = function.__module__.startswith("keras.src.losses")
    return is_of_keras and function is not keras.losses.circle


def _has_custom_metrics(model: keras.Model) -> bool:
    """Returns whether a metric, or the computation of metrics, is not Keras's own."""
    if type(model).compute_metrics is not keras.Model.compute_metrics:
        return True
    # A MeanMetricWrapper is Keras's own if the function that it wraps is.
    sources = [keras_losses.function_of(metric) for metric in keras_losses.compiled_metrics(model)]
    return not all(s.__module__.startswith("keras.src.") for s in sources)


def _computes_rows_alone(
    loss: keras.losses.Loss, examples: tuple[Any, Any], number: int, rtol: float
) -> bool | None:
    """Returns whether a loss has the same values for some rows without the others.

    Returns None if it does not take the rows that the probe draws.

    Args:
        loss: The loss.
        examples: Labels and outputs, for their shapes and dtypes.
        number: Number of the perturbation.
        rtol: Relative tolerance.
    """
    random = np.random.default_rng(number)

    def drawn(tensor: Any) -> tf.Tensor:
        shape = [6, *(3 if length is None else length for length in tensor.shape[1:])]
        if not tensor.dtype.is_floating:
            return tf.cast(random.integers(0, 2, size=shape), tensor.dtype)
        # Values between 0 and 1 are valid as probabilities, too.
        return tf.cast(random.uniform(0.05, 0.95, size=shape), tensor.dtype)

    try:
        y_true, y_pred = (tf.nest.map_structure(drawn, each) for each in examples)
        some = loss.call(batches.take(y_true, 0, 2), batches.take(y_pred, 0, 2))
        all_rows = loss.call(y_true, y_pred)
    except Exception as error:
        logger.info("The loss takes no random rows: %s", error)
        return None
    return bool(np.allclose(some, all_rows[:2], rtol, atol=1e-6))
