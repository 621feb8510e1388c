"""Reduction inference: whether values of user code are a mean or a sum over rows.

A layer's `add_loss`, an activity regularizer, and a state that a layer updates are numbers or
tensors that do not tell whether they are a mean or a sum over the rows. The static analysis of the
traced forward pass (`analysis.py`) decides that for all weights and rows, or not at all.
"""

from __future__ import annotations

import enum
import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.patches import batch_norm
from tfdist.replica.program_state import python_state_kept
from tfdist.rows.analysis import RowAnalysis
from tfdist.rows.dependence import FREE, MIXED, UNKNOWN, Dependence, Kind, worst
from tfdist.rows.keras_layers import has_only_row_by_row_layers
from tfdist.rows.lookups import LookupKind, kind_of_lookups
from tfdist.rows.traced import TracedForward, added_to, change_is_sum, is_added
from tfdist.upstream import keras_losses
from tfdist.upstream.keras_model import (
    build_by_shapes,
    flatten_layers,
    metrics_of,
    metrics_variables_of,
    overrides,
    seeds_of,
)
from tfdist.upstream.tensorflow_graphs import calls_python

logger = logging.getLogger(__name__)


class Reduction(enum.Enum):
    """How the values of replicas combine to the value of the global batch."""

    MEAN = "mean"  # weighted by rows; also for a value that does not depend on the rows
    SUM = "sum"
    SAME = "same"  # on every replica


class NotReducibleError(UnsupportedModelError):
    """A value is neither a mean nor a sum over rows, or is not known to be one."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"{reason}, so replicas cannot compute it from their rows. Override compute_loss, "
            "which gets the full batch, or use one device."
        )
        self.reason = reason


class Reductions:
    """How values of a traced graph combine over the replicas."""

    def __init__(self, analysis: RowAnalysis) -> None:
        self._analysis = analysis

    def is_plain(self, tensor: tf.Tensor) -> bool:
        """Returns whether neither rows nor their number change a value."""
        return self._analysis.of(tensor).is_plain

    def of(self, what: str, tensors: Iterable[tf.Tensor]) -> Reduction:
        """Returns the one reduction of the sums over the elements of values.

        Raises:
            NotReducibleError: There is none, or the analysis cannot tell.
        """
        kinds = {self._of_value(what, self._analysis.of(tensor)) for tensor in tensors}
        if len(kinds) != 1:
            raise NotReducibleError(f"{what} is partly a mean, partly a sum over rows")
        return kinds.pop()

    def of_change(self, what: str, start: tf.Tensor | None, new: tf.Tensor) -> Reduction:
        """Returns the reduction of a variable's change; arguments and errors are as in `of`.

        Args:
            what: Name of the change, for messages.
            start: The variable's value before the change; None if that is not known.
            new: Its value after it.
        """
        if self._analysis.of(new).is_mean:
            return Reduction.MEAN
        if (change := change_is_sum(self._analysis, start, new)) is FREE:
            return Reduction.SUM
        raise self._not_reducible(what, change)

    def of_additions(
        self, what: str, pairs: Iterable[tuple[tf.Tensor, tf.Tensor]], is_float: bool
    ) -> Reduction:
        """Returns the reduction of what is added to a metric's variable; errors are as in `of`."""
        tensors: list[tf.Tensor] = []
        for start, new in pairs:
            if (added := added_to(start, new)) is None:
                raise self._not_reducible(what, worst([self._analysis.of(new)]) or MIXED)
            tensors += added
        tensors = [tensor for tensor in tensors if not self._analysis.of(tensor).is_zero]
        if all(map(self.is_plain, tensors)) and not is_float:
            return Reduction.SAME
        return self.of(what, tensors) if tensors else Reduction.SUM

    def are_alike(self, what: str, indices: tf.Tensor) -> bool:
        """Returns whether all replicas look up the same rows; errors are as in `of`."""
        kind = kind_of_lookups(indices, self._analysis)
        if kind not in (LookupKind.ALIKE, LookupKind.PER_ROW):
            raise self._not_reducible(what, worst([self._analysis.of(indices)]) or MIXED)
        return kind is LookupKind.ALIKE

    def _of_value(self, what: str, value: Dependence) -> Reduction:
        if value.is_mean:
            return Reduction.MEAN
        if value.is_sum or (value.kind is Kind.ROWS and value.power == 0):
            return Reduction.SUM
        is_mixed = value.kind is Kind.MIXED or (
            value.kind in (Kind.ROWS, Kind.SUMMED) and value.power
        )
        raise self._not_reducible(what, MIXED if is_mixed else UNKNOWN)

    def _not_reducible(self, what: str, value: Dependence) -> NotReducibleError:
        if value is MIXED or not self._analysis.unknown:
            return NotReducibleError(f"{what} is neither a mean nor a sum over rows")
        return NotReducibleError(f"{what} {self._analysis.unknown_operations()}")


class ReductionInference:
    """Infers the reductions of one model's added losses, updated states, losses, and metrics.

    Args:
        model: A built model.
        first_batch: Returns the first global batch, for its shapes and dtypes. Called outside of
            any graph, and only for a model that has something to infer.
        compute: A step of the user's to analyze in place of the model's call; takes the batch.
        element_spec: `tf.TensorSpec`s of a global batch; None if no metrics are computed.
    """

    def __init__(
        self,
        model: keras.Model,
        first_batch: Callable[[], Any],
        compute: Callable[[Any], Any] | None = None,
        element_spec: Any = None,
    ) -> None:
        self._model, self._first_batch = model, functools.cache(first_batch)
        self._compute, self._element_spec = compute, element_spec
        self._traced: dict[bool, TracedForward] = {}
        self._independent: dict[int, bool] = {}
        self._full_batch_metrics: frozenset[int] | None = None

    def read_first_batch(self) -> None:
        """Reads the first batch if the trace of a step may need it.

        Once a pass over the data has begun, it would be read a second time.
        """
        model = self._model
        self.full_batch_metrics()
        without_trace = {id(v) for v in seeds_of(model) + model.metrics_variables}
        without_trace |= {id(v) for layer in batch_norm.layers_of(model) for v in layer.variables}
        has_state = any(id(v) not in without_trace for v in model.non_trainable_variables)
        layers = flatten_layers(model)
        if has_state or any(
            isinstance(layer, keras.layers.Embedding)
            or getattr(layer, "activity_regularizer", None) is not None
            for layer in layers
        ):
            self._first_batch()

    def loss_reductions(self, num_losses: int, training: bool) -> list[Reduction]:
        """Returns the reduction of each added loss, in the order in which layers add them.

        Raises:
            UnsupportedModelError: A loss is neither a mean nor a sum over rows.
        """
        traced = self.traced(training)
        if len(traced.losses) != num_losses:
            raise UnsupportedModelError(
                f"The layers add {num_losses} losses in training, but {len(traced.losses)} when "
                "called again. Replicas cannot split a loss that is added in some calls only. Add "
                "it in every call, or use one device."
            )
        reductions = Reductions(traced.analysis)
        return [reductions.of(f"add_loss number {i}", [t]) for i, t in enumerate(traced.losses)]

    def state_reduction(self, variable: keras.Variable) -> Reduction:
        """Returns the reduction of the change that a forward pass makes to a variable.

        Raises:
            UnsupportedModelError: The change is neither a mean nor a sum over rows.
        """
        traced = self.traced(True)
        for changed, start, new in traced.changed:
            if changed is variable:
                what = f"The update of {variable.path!r}"
                return Reductions(traced.analysis).of_change(what, start, new)
        raise UnsupportedModelError(
            f"{variable.path!r} is not updated by the model's call, so tfdist cannot infer how to "
            "combine the updates of replicas. Update it in call, or use one device."
        )

    def full_batch_metrics(self) -> frozenset[int]:
        """Returns the ids of the metrics' variables, if the metrics need full batches.

        The result is empty where each batch adds a sum over its rows to the metrics, as Keras's
        own metrics do.
        """
        if self._full_batch_metrics is None:
            metrics: frozenset[int] = frozenset()
            if _has_custom_metrics(self._model) or self._metrics_may_mix_rows():
                with tf.init_scope():
                    batch = keras.utils.unpack_x_y_sample_weight(self._first_batch())
                    metrics = _full_batch_metrics(self._model, batch)
            self._full_batch_metrics = metrics
        return self._full_batch_metrics

    def _metrics_may_mix_rows(self) -> bool:
        """Returns whether a metric of Keras may broadcast labels along another axis than rows."""
        functions = map(keras_losses.function_of, keras_losses.compiled_metrics(self._model))
        elementwise = [f for f in functions if inspect.isroutine(f)]
        if self._element_spec is None or not elementwise:
            return False
        x, y, _ = keras.utils.unpack_x_y_sample_weight(self._element_spec)
        labels = [spec for spec in tf.nest.flatten(y) if spec is not None and spec.shape.rank]
        outputs = getattr(self._model, "outputs", None)
        if outputs is None and any(label.shape.rank == 1 for label in labels):
            symbolic = tf.nest.map_structure(
                lambda s: s and keras.KerasTensor(s.shape, s.dtype.name), x
            )
            try:
                with python_state_kept(self._model):
                    outputs = tf.nest.flatten(build_by_shapes(self._model, symbolic))
            except Exception as error:
                logger.info("The shapes of outputs are not known: %s", error)
                outputs = []
        pairs = [(label, each) for label in labels for each in outputs or () if each.shape]
        return any(_are_broadcast(f, *pair) for f in elementwise for pair in pairs)

    def has_independent_rows(self, number: int, y_true: Any, y_pred: Any) -> bool:
        """Returns whether a compiled loss is known to compute each row's value from that row alone.

        Args:
            number: Place of the loss among the compiled losses of the model.
            y_true: Labels as it takes them, for their shapes and dtypes.
            y_pred: Outputs as it takes them.
        """
        compile_loss = keras_losses.compile_loss(self._model)
        loss = keras_losses.compiled_losses(compile_loss)[number]
        function = getattr(loss, "fn", type(loss))
        if _is_row_by_row(loss) and not _are_broadcast(function, y_true, y_pred):
            return True
        if number not in self._independent:
            with tf.init_scope():
                self._independent[number] = _has_independent_rows(self._model, loss, y_true, y_pred)
        return self._independent[number]

    def traced(self, training: bool) -> TracedForward:
        """Returns the traced forward pass.

        Raises:
            NotReducibleError: It cannot be traced.
        """
        if training not in self._traced:
            with tf.init_scope():
                batch = self._first_batch()
                if self._compute is None:
                    batch = keras.utils.unpack_x_y_sample_weight(batch)[0]
                self._traced[training] = _traced(self._model, batch, training, self._compute)
        return self._traced[training]


def _traced(
    model: keras.Model, x: Any, training: bool, compute: Callable[[Any], Any] | None
) -> TracedForward:
    is_plain = has_only_row_by_row_layers(model) and compute is None
    if getattr(model, "run_eagerly", False) and not is_plain:
        raise NotReducibleError("run_eagerly=True lets layers do what a graph does not show")
    try:
        return TracedForward(model, x, training, compute)
    except ValueError as error:
        raise NotReducibleError(str(error)) from error


def _full_batch_metrics(model: keras.Model, batch: tuple[Any, Any, Any]) -> frozenset[int]:
    """Returns the ids of the variables that metrics update, unless all updates are sums.

    An overridden `compute_loss` gets the full batch, and may add other numbers to metrics as well.
    """
    states = metrics_variables_of(model)
    updates: dict[int, tuple[Any, Any]] = {}
    of_full_batch: dict[int, tuple[Any, Any]] = {}

    def note(found: dict[int, tuple[Any, Any]], update: Callable[[], Any]) -> None:
        start = [(v, tf.identity(tf.convert_to_tensor(v))) for v in states]
        with keras.StatelessScope(start) as scope:
            update()
        ends = [(id(v), first, scope.get_current_value(v)) for v, first in start]
        found.update({key: (first, new) for key, first, new in ends if new is not first})

    def compute(tensors: Any) -> None:
        x, y, y_pred, weight = tensors
        note(updates, lambda: model.compute_metrics(x, y, y_pred, sample_weight=weight))
        if overrides(model, "compute_loss"):
            batch = (x, y, y_pred, weight)
            note(of_full_batch, lambda: keras_losses.total_loss(model, [], batch, training=False))

    with keras.StatelessScope(), python_state_kept(model):
        y_pred = model(batch[0], training=False)
    rows = (batch[0], batch[1], y_pred, batch[2])
    try:
        traced = TracedForward(model, rows, training=False, compute=compute)
    except ValueError as error:
        logger.info("Metrics get full batches: %s", error)
        with python_state_kept(model):
            compute(rows)
        return frozenset(updates | of_full_batch)
    is_sum = all(change_is_sum(traced.analysis, *update) is FREE for update in updates.values())
    is_sum &= all(is_added(*update) for update in of_full_batch.values())
    return frozenset() if is_sum else frozenset(updates | of_full_batch)


def _has_independent_rows(
    model: keras.Model, loss: keras.losses.Loss, y_true: Any, y_pred: Any
) -> bool:
    rows = tf.nest.map_structure(_sample, (y_true, y_pred))
    try:
        traced = TracedForward(model, rows, training=True, compute=lambda pair: loss.call(*pair))
    except ValueError as error:
        logger.info("The loss gets full batches: %s", error)
        return False
    if calls_python(traced.operations):
        name = getattr(loss, "name", type(loss).__name__)
        warnings.warn(
            f"The loss {name!r} calls Python, which happens on each replica and not once per step. "
            "If it draws random numbers or counts, compile the model with run_eagerly=True.",
            stacklevel=2,
        )
    (value,) = [traced.analysis.of(t) for t in traced.outputs]
    return value.is_led_by_rows and value.is_row_wise and value.factor == 1


def _sample(tensor: Any) -> tf.Tensor:
    """Returns two rows with the shape and dtype of a tensor, all ones."""
    shape = [2, *(3 if length is None else length for length in tensor.shape[1:])]
    return tf.ones(shape, tensor.dtype)


def _is_row_by_row(loss: keras.losses.Loss) -> bool:
    """Returns whether a loss is Keras's; those treat each row by itself, except for Circle."""
    function = getattr(loss, "fn", type(loss))  # what a LossFunctionWrapper wraps
    is_of_keras = function.__module__.startswith("keras.src.losses")
    return is_of_keras and function is not keras.losses.circle


def _are_broadcast(function: Any, y_true: Any, y_pred: Any) -> bool:
    """Returns whether labels have another rank than outputs, so that rows may meet columns.

    Losses and metrics of sparse labels and of sequences take them so.
    """
    name = function.__name__.lower()
    if "sparse" in name or "ctc" in name:
        return False
    ranks = {len(y_true.shape): y_true, len(y_pred.shape): y_pred}
    higher = ranks[max(ranks)]
    return len(ranks) > 1 and not (max(ranks) - min(ranks) == 1 and higher.shape[-1] == 1)


def _has_custom_metrics(model: keras.Model) -> bool:
    """Returns whether a metric, or the computation of metrics, is not Keras's own."""
    if overrides(model, "compute_metrics"):
        return True
    if overrides(model, "compute_loss") and not all(
        type(metric).__module__.startswith("keras.src.") for metric in metrics_of(model)
    ):
        return True
    # A MeanMetricWrapper is Keras's own if the function that it wraps is.
    sources = [keras_losses.function_of(metric) for metric in keras_losses.compiled_metrics(model)]
    return not all(s.__module__.startswith("keras.src.") for s in sources)
