"""The logs of Keras's own steps: what `compute_metrics` returns, also if a model overrides it.

Keras's steps return what `compute_metrics` returns for the batch. It is what `get_metrics_result`
returns, unless an override adds entries. Entries that are computed from metrics (a root of a mean)
are computed after the step, from the metrics of all replicas. Entries that are computed from the
batch itself need a custom step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist.upstream.keras_model import metrics_of, overrides
from tfdist.upstream.patching import replaced
from tfdist.upstream.tensorflow_graphs import depends_on_inputs


class MetricResults:
    """Returns the logs of a model's steps, in the graph or outside of it.

    Args:
        model: A built and compiled model.
        element_spec: `tf.TensorSpec`s of a global batch.
    """

    def __init__(self, model: keras.Model, element_spec: Any) -> None:
        self._model = model
        self._of_batch: tuple[Any, ...] | None = None
        if overrides(model, "compute_metrics"):
            self._of_batch = tf.nest.map_structure(_zeros, _with_outputs(model, element_spec))

    def __call__(self) -> dict[str, Any]:
        """Returns the metrics over all steps since their last reset."""
        results = self._model.get_metrics_result()
        if self._of_batch is None:
            return results
        logs = self._computed(*self._of_batch)
        return results if logs.keys() == results.keys() else logs

    def need_batch(self) -> bool:
        """Returns whether a result that is not one of the metrics is computed from the batch."""
        if self._of_batch is None:
            return False
        spec = tf.nest.map_structure(tf.type_spec_from_value, self._of_batch)
        function = tf.function(self._computed, autograph=False).get_concrete_function(*spec)
        keys = function.structured_outputs.keys()
        return keys != self._model.get_metrics_result().keys() and depends_on_inputs(function)

    def _computed(self, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> dict[str, Any]:
        """Returns what `compute_metrics` returns for the metrics as they are."""
        with _updates_ignored(self._model), keras.StatelessScope():
            return self._model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


@contextmanager
def _updates_ignored(model: keras.Model) -> Iterator[None]:
    with ExitStack() as stack:
        for metric in metrics_of(model):
            stack.enter_context(replaced(metric, "update_state", lambda *_, **__: None))
        yield


def _with_outputs(model: keras.Model, element_spec: Any) -> tuple[Any, ...]:
    """Returns the specs of inputs, labels, outputs and sample weights of a batch."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(element_spec)

    def outputs(inputs: Any) -> Any:
        with keras.StatelessScope():
            return model(inputs, training=False)

    traced = tf.function(outputs, autograph=False).get_concrete_function(x)
    spec = tf.nest.map_structure(tf.type_spec_from_value, traced.structured_outputs)
    return x, y, spec, weight


def _zeros(spec: Any) -> Any:
    """Returns one row of zeros in the form of a spec; None for None."""
    return None if spec is None else tf.zeros([size or 1 for size in spec.shape], spec.dtype)


def flat(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns logs with nested dictionaries, as of a metric's results, flattened as Keras does."""
    parts = [flat(v) if isinstance(v, Mapping) else {name: v} for name, v in logs.items()]
    return functools.reduce(lambda a, b: a | b, parts, {})
