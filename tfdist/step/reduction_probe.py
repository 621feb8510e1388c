"""Reduction inference: whether values of user code are a mean or a sum over rows.

A layer's `add_loss`, an activity regularizer, and a state that a layer updates are numbers or
tensors that do not tell whether they are a mean or a sum over the rows. The static analysis of the
traced forward pass (`row_analysis.py`) decides that where it knows all operations. What it does not
know is probed (`probes.py`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.step import perturbation
from tfdist.step.equal_draws import draws_alike_for_all_rows
from tfdist.step.probes import ForwardPass, forward_passes, inferred, probe_rows, rounding
from tfdist.step.reductions import (
    DECISIONS,
    Reduction,
    decided,
    reduction_of,
    reduction_of_change,
    worst_decision,
)
from tfdist.step.row_dependence import FREE, UNKNOWN, Dependence, Kind
from tfdist.step.traced_forward import TracedForward, change_is_sum
from tfdist.strategies import batches
from tfdist.upstream import keras_losses

logger = logging.getLogger(__name__)


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
        self._passes: dict[bool, list[list[ForwardPass]]] = {}
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
                decided(f"add_loss number {i}", reduction_of(value))
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
                    kind or inferred(f"add_loss number {i}", passes, _loss_number(i), self._rtol)
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
                if changed is variable and (kind := decided(what, found)):
                    return kind
        passes = self._forward_passes(True)
        if id(variable) not in passes[0][0].changes:
            raise UnsupportedModelError(
                f"{variable.path!r} is not updated by the model's call, so tfdist cannot infer how "
                "to combine the updates of replicas. Update it in call, or use one device."
            )
        slack = passes[0][0].rounding[id(variable)]
        return inferred(what, passes, lambda one: one.changes[id(variable)], self._rtol, slack)

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

    def _forward_passes(self, training: bool) -> list[list[ForwardPass]]:
        """Returns the forward passes over two parts of the rows, and both, by perturbation."""
        if training not in self._passes:
            DECISIONS["probe"] += 1
            with tf.init_scope(), draws_alike_for_all_rows():
                x = keras.utils.unpack_x_y_sample_weight(self._first_batch())[0]
                passes = [forward_passes(self._model, x, training, 0)]
                for number in range(1, perturbation.COUNT):
                    with suppress(Exception):  # other rows may be invalid to the model
                        passes.append(forward_passes(self._model, x, training, number))
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


def _loss_number(number: int) -> Callable[[ForwardPass], Any]:
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
