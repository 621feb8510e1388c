"""Traces each call of a layer on the device of its stage.

A tensor that enters a stage passes a gate: an identity operation on the stage's device with the
control dependencies of the schedule. Its gradient passes a gate back, on the device that it came
from. `tf.gradients` places backward operations on the devices of their forward operations.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist.strategies.pipeline.schedule import Order, Pass
from tfdist.upstream.keras_layers import is_in_remat_scope
from tfdist.upstream.keras_model import flatten_layers, mask_of, set_mask
from tfdist.upstream.tensorflow_graphs import current_graph


class Tracing:
    """The calls of all micro-batches in the graph that is being traced.

    Args:
        stages: The stages of the calls of an operation, in order, if it is in stages.
        devices: The device of each stage.
        order: The order of the micro-batches.
        micro_batch: Returns the micro-batch that the calling thread traces; None: it traces none.
    """

    def __init__(
        self,
        stages: Mapping[keras.Operation, Sequence[int]],
        devices: Sequence[str],
        order: Order,
        micro_batch: Callable[[], int | None],
    ) -> None:
        self._stages, self._devices, self._order = stages, devices, order
        values = (
            (v.value, min(numbers))
            for operation, numbers in stages.items()
            for v in getattr(operation, "variables", [])
        )
        self._stages_of_weights: dict[Any, int] = {}  # the first that reads it stores it
        for value, stage in values:
            if isinstance(value, tf.Variable):
                key = value.ref()
                self._stages_of_weights[key] = min(stage, self._stages_of_weights.get(key, stage))
        self._micro_batch = micro_batch
        self._graph = current_graph()
        # The stage of a micro-batch's current call; None if it is recomputed in the backward pass.
        self._inside: dict[int, int | None] = {}
        self._num_calls: collections.Counter[tuple[int, int]] = collections.Counter()
        self._copies: dict[tuple[str, Any], tf.Tensor] = {}
        # By micro-batch and id of a tensor. The tensor is kept, so that no other gets its id.
        self._made_in: dict[tuple[int, int], tuple[int, tf.Tensor]] = {}
        self._entered: dict[tuple[int, int, int], tuple[tf.Tensor, tf.Tensor]] = {}
        # By the index of a source: its gradients of the micro-batches so far, and their sum.
        self._sums: dict[int, tuple[tuple[tf.Tensor, ...], tf.Tensor]] = {}

    def call(self, plain: Callable[..., Any], operation: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls an operation on the device of its stage, with all that it calls itself."""
        number = self._micro_batch()
        stages = self._stages.get(operation)
        if stages is None or number is None or number in self._inside:
            return plain(operation, *args, **kwargs)
        if current_graph() is not self._graph:  # that of a probe, not part of a micro-batch
            return plain(operation, *args, **kwargs)
        stage = stages[self._num_calls[number, id(operation)] % len(stages)]
        self._num_calls[number, id(operation)] += 1
        args, kwargs = keras.tree.map_structure(
            lambda leaf: self._entering(number, stage, leaf), (args, kwargs)
        )
        parts = flatten_layers(operation) if isinstance(operation, keras.layers.Layer) else []
        self._inside[number] = None if any(map(is_in_remat_scope, parts)) else stage
        try:
            with tf.device(self._devices[stage]):
                outputs = plain(operation, *args, **kwargs)
        finally:
            del self._inside[number]
        output_tensors = [t for t in keras.tree.flatten(outputs) if isinstance(t, tf.Tensor)]
        if not tf.executing_eagerly():
            for tensor in output_tensors:
                self._made_in[number, id(tensor)] = (stage, tensor)
            self._order.has_gone_forward(stage, number, output_tensors)
        return outputs

    def value(self, variable: Any) -> Any:
        """Returns what a layer reads of a variable: in another stage, one copy for each step.

        A rematerialized layer reads the variable, because only variables have a gradient then.
        """
        number = self._micro_batch()
        stage = None if number is None else self._inside.get(number)
        is_here = current_graph() is self._graph
        if stage is None or not isinstance(variable, tf.Variable) or not is_here:
            return variable
        stored, device = self._stages_of_weights.get(variable.ref(), stage), self._devices[stage]
        if self._devices[stored] == device or not variable.dtype.is_floating:
            return variable
        key = device, variable.ref()
        if key not in self._copies:
            with _placed(self._devices[stored], []):
                stored_value = variable.read_value()
            with _placed(device, []):
                self._copies[key] = tf.identity(stored_value)
        return self._copies[key]

    def gradients(self, loss: tf.Tensor, sources: Sequence[Any]) -> list[Any]:
        """Returns the gradients of a micro-batch, in the order of the pipeline's schedule."""
        number, last = self._micro_batch(), len(self._devices) - 1
        if number is None:
            raise RuntimeError("gradients are taken within a micro-batch")
        pass_ = Pass(last, number, "backward")
        with _placed(self._devices[last], [loss, *self._order.before(pass_)]):
            begin = tf.ones_like(loss)
        self._order.begins(pass_, begin)
        gradients = tf.gradients(loss, sources, begin)
        for index, (source, gradient) in enumerate(zip(sources, gradients, strict=True)):
            if gradient is not None:
                is_weight = isinstance(source, tf.Variable)
                stage = self._stages_of_weights.get(source.ref(), last) if is_weight else last
                if isinstance(gradient, tf.IndexedSlices):
                    total = gradient.values
                else:
                    # Added at once, so that only one gradient needs memory at a time. What comes
                    # next waits for the sum, which also keeps TensorFlow from merging additions.
                    added, before = self._sums.get(index, ((), None))
                    total = gradient
                    if before is not None:
                        with _placed(gradient.device, []):
                            total = tf.add(before, gradient)
                    self._sums[index] = ((*added, gradient), total)
                self._order.has_gone_back(stage, number, [total], of_weights=True)
        return gradients

    def sum_of(self, terms: Sequence[Any]) -> tf.Tensor | None:
        """Returns the known sum of the gradients of all micro-batches; None for other terms."""
        for added, total in self._sums.values():
            if len(added) == len(terms) and all(map(operator.is_, added, terms)):
                return total
        return None

    def _entering(self, number: int, stage: int, tensor: Any) -> Any:
        """Returns a tensor as it enters a stage, with one gate for each stage."""
        if not isinstance(tensor, tf.Tensor) or tf.executing_eagerly():
            return tensor
        source, _ = self._made_in.get((number, id(tensor)), (None, None))
        if source == stage:
            return tensor
        key = (number, id(tensor), stage)
        if key not in self._entered:
            inside = self._gate(number, stage, source, tensor)
            mask = mask_of(tensor)
            if mask is not None:
                set_mask(inside, mask)
            self._made_in[number, id(inside)] = (stage, inside)
            self._entered[key] = (inside, tensor)
        return self._entered[key][0]

    def _gate(self, number: int, stage: int, source: int | None, tensor: tf.Tensor) -> tf.Tensor:
        def forward(tensor: tf.Tensor) -> tf.Tensor:
            return self._first_of(Pass(stage, number, "forward"), tensor)

        if source is None or not (tensor.dtype.is_floating or tensor.dtype.is_complex):
            return forward(tensor)

        def back(gradient: tf.Tensor) -> tf.Tensor:
            self._order.has_gone_back(stage, number, [gradient])
            return self._first_of(Pass(source, number, "backward"), gradient)

        @tf.custom_gradient
        def through(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
            return forward(tensor), back

        return through(tensor)

    def _first_of(self, pass_: Pass, tensor: tf.Tensor) -> tf.Tensor:
        """Returns a tensor on the device of a pass, when the pass may begin."""
        with _placed(self._devices[pass_.stage], self._order.before(pass_)):
            gate = tf.identity(tensor)
        self._order.begins(pass_, gate)
        return gate


@contextmanager
def _placed(device: str, after: Sequence[tf.Tensor]) -> Iterator[None]:
    """Returns a context on a device, after tensors, colocated with no other operation."""
    beside_none = tf.compat.v1.get_default_graph().colocate_with(None, ignore_existing=True)
    with beside_none, tf.device(device), tf.control_dependencies(after):
        yield
