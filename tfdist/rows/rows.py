"""May the rows of a batch be split? If rows depend on each other, a model needs full batches.

A layer may subtract the batch's mean, an output may hold the distances between all pairs of rows,
and a number of rows may be hard-coded in the model. Such a model cannot be computed on parts of a
batch. Models that are made of Keras's own layers are known to be row by row. The forward pass of
others is traced, and the axis of the rows is followed through the graph (`analysis.py`). A
model gets full batches unless this proves that its rows are independent, for all weights and rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.patches import batch_norm
from tfdist.replica.program_state import python_state_kept
from tfdist.rows.dependence import FREE, MIXED
from tfdist.rows.keras_layers import has_only_row_by_row_layers
from tfdist.rows.lookups import Lookups
from tfdist.rows.reductions import NotReducibleError, ReductionInference
from tfdist.rows.traced import TracedForward, change_is_sum
from tfdist.strategies.batches import uneven
from tfdist.upstream import keras_losses, keras_model
from tfdist.upstream.tensorflow_graphs import calls_python

logger = logging.getLogger(__name__)

#: Operations that may look up rows of a weight.
_LOOKUPS = {"Gather", "GatherNd", "GatherV2", "ResourceGather", "ResourceGatherNd"}


class Rows:
    """How a model treats the rows of a batch, and how what replicas compute of theirs combines.

    The only door of this package.

    Args:
        model: A built model.
        first_batch: Returns the first global batch, for its shapes and dtypes. Called outside of
            any graph, and only for a model that has other layers, losses or metrics than Keras's,
            or embeddings.
        element_spec: `tf.TensorSpec`s of a global batch; None if no metrics are computed.

    Attributes:
        reductions: Those of losses, states and metrics.
        lookups: The rows that the model looks up in its embeddings.
    """

    def __init__(
        self, model: keras.Model, first_batch: Callable[[], Any], element_spec: Any = None
    ) -> None:
        self._model, self._first_batch = model, first_batch
        self.reductions = ReductionInference(model, first_batch, element_spec=element_spec)
        self.lookups = Lookups(model, first_batch)

    def full_batch_reason(self, training: bool, predicts: bool = False) -> str | None:
        """Returns why the model needs full batches; None if it does not.

        Args:
            training: Whether the model is called as in training.
            predicts: Whether replicas exchange nothing but outputs, so that a state which the call
                updates needs full batches.
        """
        model = self._model
        # ---- what only user code can be ----
        layers = keras_model.flatten_layers(model)
        # float8 layers keep the largest absolute values of their inputs and gradients.
        float8 = [one for one in layers if getattr(one, "quantization_mode", None) == "float8"]
        maxima = {id(v) for layer in float8 for v in layer.variables}
        for weight in model.trainable_variables if training else ():
            if weight.overwrite_with_gradient and id(weight) not in maxima:
                return f"the gradient of {weight.path} is its new value, from the full batch"
        for layer in layers:
            if getattr(layer, "stateful", False):
                return f"{type(layer).__name__} {layer.name!r} keeps a state for each row"
        if not predicts and getattr(model, "run_eagerly", False) and _has_custom_functions(model):
            return "run_eagerly=True lets losses and metrics do what a graph does not show"
        has_predict_step = predicts and keras_model.overrides(model, "predict_step")
        if has_only_row_by_row_layers(model) and not has_predict_step:
            return None

        # ---- what the graph shows ----
        with tf.init_scope(), batch_norm.fixed_moments(model):  # each replica's are documented
            batch = self._first_batch()
            if (reason := uneven(batch)) is not None:
                return reason
            reductions = self.reductions
            if has_predict_step:
                reductions = ReductionInference(model, lambda: batch, model.predict_step)
            try:
                traced = reductions.traced(training)
                reason = _outputs_reason(traced) or _states_reason(
                    reductions, traced, model, predicts
                )
            except NotReducibleError as error:
                x = keras.utils.unpack_x_y_sample_weight(batch)[0]
                # Python code that runs eagerly is not called more often than by Keras.
                is_valid = model.run_eagerly or _can_be_called(model, x, training)
                return error.reason if is_valid else None
        may_look_up = keras_model.overrides(model, "compute_loss") or traced.operations & _LOOKUPS
        if reason is None and training and may_look_up:
            return self.lookups.full_batch_reason()
        return reason


def _outputs_reason(traced: TracedForward) -> str | None:
    """Returns which layer mixes rows, or may do so, or which output has no rows."""
    dependence, layer = traced.mixing_layer()
    if calls_python(traced.operations):
        return "the model calls Python, or reads or writes data, as one device does, once per step"
    if dependence is FREE:
        values = [(output, traced.analysis.of(output)) for output in traced.outputs]
        alike = [t for t, v in values if v.is_plain and not (v.is_zero and t.shape[:1] == [None])]
        return f"an output of shape {alike[0].shape} has no row per example" if alike else None
    name = "the model" if layer is None else f"{type(layer).__name__} {layer.name!r}"
    mixes = (
        "mixes the rows of a batch" if dependence is MIXED else traced.analysis.unknown_operations()
    )
    return f"{name} {mixes}"


def _has_custom_functions(model: keras.Model) -> bool:
    """Returns whether a loss or metric that was passed to `compile` is not Keras's own."""
    if not model.compiled:
        return False
    if keras_model.overrides(model, "compute_loss") or keras_model.overrides(
        model, "compute_metrics"
    ):
        return True
    config = keras_model.compile_config(model).config
    values = [config.get(name) for name in ("loss", "metrics", "weighted_metrics")]
    functions = [
        getattr(value, "fn", None) or keras_losses.function_of(value)
        for value in keras.tree.flatten(values)
        if value is not None and not isinstance(value, str)
    ]
    return not all(f.__module__.startswith("keras.") for f in functions)


def _states_reason(
    reductions: ReductionInference, traced: TracedForward, model: keras.Model, predicts: bool
) -> str | None:
    """Returns which updated state needs the full batch.

    In a prediction, every updated state does.

    Raises:
        NotReducibleError: An added loss or an updated state is neither a mean nor a sum over rows.
    """
    generator = keras_model.global_generator()
    metrics = {id(v) for v in keras_model.metrics_variables_of(model)}
    exempt = {id(v) for v in keras_model.seeds_of(model)} | (set() if predicts else metrics)
    exempt |= {id(v) for layer in batch_norm.layers_of(model) for v in layer.variables}
    exempt |= set() if generator is None else {id(generator.state)}
    if not predicts:
        reductions.loss_reductions(len(traced.losses), traced.training)
    for state, start, new in traced.changed:
        if id(state) in metrics and change_is_sum(traced.analysis, start, new) is not FREE:
            return f"the update of {state.path!r} is not a sum over rows"
        if id(state) in exempt or keras_model.is_seed(state):
            continue
        if predicts:
            return f"a prediction updates {state.path!r}"
        reductions.state_reduction(state)
    return None


def _can_be_called(model: keras.Model, x: Any, training: bool) -> bool:
    """Returns whether a model takes its inputs; if not, the first step explains why."""
    try:
        with keras.StatelessScope(), python_state_kept(model):
            keras_model.call_model(model, x, training)
    except Exception as error:
        logger.debug("The model does not take its inputs: %s", error)
        return False
    return True
