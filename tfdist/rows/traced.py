"""A forward pass that is traced for the static analysis, and never run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.errors import UnsupportedModelError, first_line
from tfdist.patches import batch_norm
from tfdist.patches.rematerialized import lifted
from tfdist.replica.program_state import python_state_kept
from tfdist.replica.scope import Scope
from tfdist.rows.analysis import RowAnalysis
from tfdist.rows.dependence import (
    FREE,
    MIXED,
    UNKNOWN,
    Dependence,
    Kind,
    beside_each_other,
    rows,
    worst,
)
from tfdist.rows.keras_layers import is_called_row_by_row
from tfdist.strategies.batches import has_rows
from tfdist.upstream.keras_layers import row_by_row_functions
from tfdist.upstream.keras_model import call_model, flatten_layers, metrics_variables_of
from tfdist.upstream.patching import replaced
from tfdist.upstream.tensorflow_calls import functions_inlined
from tfdist.upstream.tensorflow_graphs import free_with, kinds_of
from tfdist.upstream.tensorflow_runtime import variables_assigned_by


class TracedCall(NamedTuple):
    """One call of a layer, of the model itself, or of a function that is known to be row by row."""

    layer: keras.layers.Layer | None  # None for a function
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor]


class TracedForward:
    """The forward pass of a model on a batch with any number of rows, with its analysis.

    BatchNormalization uses its moving moments, since those of each replica are documented.

    Args:
        model: A built model.
        batch: Inputs and whatever else `compute` takes; gives shapes and dtypes. Dense tensors
            stand in for sparse ones.
        training: As in `Model.call`.
        compute: Called with the batch's tensors in place of the model's call.
        same: Tensors of the graph that are the same on all replicas, which `compute` may append.

    Attributes:
        training: As in `Model.call`.
        outputs: Outputs of the model, or of `compute`.
        losses: Added losses, in the order in which layers add them.
        changed: Variables that were assigned to, with their values before and after.
        calls: The calls of all layers in the order in which they returned.
        operations: Types of all operations.

    Raises:
        ValueError: The batch has ragged tensors, or the model cannot be traced.
        UnsupportedModelError: It assigns to a `tf.Variable`.
    """

    def __init__(
        self,
        model: keras.Model,
        batch: Any,
        training: bool,
        compute: Callable[[Any], Any] | None = None,
        same: Sequence[tf.Tensor] = (),
    ) -> None:
        self.training = training
        flat = tf.nest.flatten(batch)
        leaves = [leaf for leaf in flat if leaf is not None]
        if not all(isinstance(leaf, (tf.Tensor, tf.SparseTensor)) for leaf in leaves):
            raise ValueError("the batch has ragged tensors")
        self._has_rows = [bool(has_rows(leaf)) for leaf in leaves]
        self.calls: list[TracedCall] = []
        self.changed: list[tuple[keras.Variable, tf.Tensor | None, tf.Tensor]] = []
        self._call = compute or functools.partial(call_model, model, training=training)
        specs = [
            tf.TensorSpec([None, *leaf.shape[1:]] if has else leaf.shape, leaf.dtype)
            for leaf, has in zip(leaves, self._has_rows, strict=True)
        ]

        def forward(*tensors: tf.Tensor) -> None:
            self._inputs, given = list(tensors), iter(tensors)
            filled = [None if leaf is None else next(given) for leaf in flat]
            self._trace(model, tf.nest.pack_sequence_as(batch, filled))

        assigned: list[tf.Variable] = []

        def note(variable: tf.Variable, *_: Any, **__: Any) -> tf.Tensor:
            assigned.append(variable)
            return variable.read_value()

        self._function = tf.function(forward, autograph=False)
        try:
            # An init_scope stops all tapes, also those that `compute` opens.
            scope = nullcontext() if tf.executing_eagerly() else tf.init_scope()
            with scope, variables_assigned_by(note), python_state_kept(model):
                graph = self._function.get_concrete_function(*specs).graph
        except Exception as error:
            reason = f"it cannot be traced with any number of rows ({first_line(error)})"
            raise ValueError(reason) from error
        if assigned:
            raise refused_assignment("model", assigned[0])
        free_with(self._function, [graph])
        self.operations = kinds_of(graph)
        kinds = [rows() if has else FREE for has in self._has_rows]
        given = zip([*self._inputs, *same], [*kinds, *[FREE] * len(same)], strict=True)
        self.analysis = RowAnalysis(given)
        for call in self.calls:
            self._know_outputs(call)

    def _trace(self, model: keras.Model, batch: Any) -> None:
        # Keras does not count the metrics that layers hold among a model's variables.
        variables = [v for v in model.variables if not v.trainable] + metrics_variables_of(model)
        unique = {id(v): v for v in variables}.values()
        starts = [(v, tf.identity(tf.convert_to_tensor(v))) for v in unique]
        with ExitStack() as stack:
            scope = stack.enter_context(Scope(starts, collect_losses=True))
            stack.enter_context(batch_norm.fixed_moments(model))
            stack.enter_context(lifted())
            stack.enter_context(functions_inlined())
            for layer in flatten_layers(model):
                stack.enter_context(replaced(layer, "call", self._recorded(layer, layer.call)))
            for owner, name in row_by_row_functions():
                recorded = self._recorded(None, getattr(owner, name))
                stack.enter_context(replaced(owner, name, recorded))
            outputs = self._call(batch)
            self.outputs = _tensors(outputs)
            self.losses = list(scope.losses)
            before = {id(v): start for v, start in starts}
            for variable in scope.updated.values():
                new = scope.get_current_value(variable)
                self.changed.append((variable, before.get(id(variable)), new))

    def _recorded(
        self, layer: keras.layers.Layer | None, call: Callable[..., Any]
    ) -> Callable[..., Any]:
        @functools.wraps(call)
        def record(*args: Any, **options: Any) -> Any:
            outputs = call(*args, **options)
            self.calls.append(TracedCall(layer, _tensors((args, options)), _tensors(outputs)))
            return outputs

        return record

    def _know_outputs(self, call: TracedCall) -> None:
        """Gives the outputs of Keras's own layers their class, as their inputs have rows."""
        if call.layer is not None and not is_called_row_by_row(call.layer, call.inputs):
            return
        values = [self.analysis.of(tensor) for tensor in call.inputs]
        for tensor, value in zip(call.inputs, values, strict=True):
            if not (value.is_plain or value.is_led_by_rows):
                return
            if value.is_plain and tensor.shape.rank and tensor.shape[0] != 1:
                return
        if all(value.is_plain for value in values):
            return
        dependence = beside_each_other(values)
        for tensor in call.outputs:
            self.analysis.set(tensor, dependence)

    def mixing_layer(self) -> tuple[Dependence, keras.layers.Layer | None]:
        """Returns the worst class of the outputs, and the layer that first has such outputs.

        Returns:
            FREE if the outputs have values for each row, MIXED if rows depend on each other, and
            UNKNOWN if neither is known.
        """
        calls = [call for call in self.calls if call.layer is not None]
        last = calls[-1].layer if calls else None
        if (dependence := self._class_of(self.outputs)) is FREE:
            return dependence, last
        for call in calls:
            if self._class_of(call.outputs) is dependence and self._class_of(call.inputs) is FREE:
                return dependence, call.layer
        return dependence, last

    def _class_of(self, tensors: list[tf.Tensor]) -> Dependence:
        values = [self.analysis.of(tensor) for tensor in tensors]
        if all(value.is_row_wise for value in values):
            return FREE
        has_unknown = worst([v for v in values if v.kind is not Kind.MIXED]) is UNKNOWN
        return UNKNOWN if has_unknown else MIXED


def refused_assignment(what: str, variable: tf.Variable) -> UnsupportedModelError:
    """Returns the error for a `tf.Variable` to which a model or its step assigns."""
    name = getattr(variable, "name", "")
    return UnsupportedModelError(
        f"The {what} assigns to the tf.Variable {name!r}, to which replicas would write different "
        "values. Create a Keras variable instead, with self.add_weight(trainable=False), or with "
        "self.add_weight() in a metric."
    )


def change_is_sum(analysis: RowAnalysis, start: tf.Tensor | None, new: tf.Tensor) -> Dependence:
    """Returns FREE if a variable's change is a sum over rows, MIXED if not, or UNKNOWN.

    Args:
        analysis: Analysis of the graph.
        start: The variable's value before the change; None if that is not known.
        new: Its value after it.
    """
    if (changes := added_to(start, new)) is None:
        return UNKNOWN if worst([analysis.of(new)]) is UNKNOWN else MIXED
    values = [analysis.of(change) for change in changes]
    if all(value.is_sum for value in values):
        return FREE
    return UNKNOWN if worst(values) is UNKNOWN else MIXED


def added_to(start: tf.Tensor | None, new: tf.Tensor) -> list[tf.Tensor] | None:
    """Returns what is added to a tensor, or subtracted from it; None if it is used otherwise."""
    if new is start:
        return []
    op = new.op
    if op.type in ("Identity", "StopGradient") or (
        op.type == "Cast" and op.inputs[0].dtype == new.dtype
    ):
        return added_to(start, op.inputs[0])
    if op.type in ("Add", "AddV2", "Sub"):
        one, other = op.inputs
        if (before := added_to(start, one)) is not None:
            return [*before, other]
        if op.type != "Sub" and (before := added_to(start, other)) is not None:
            return [*before, one]
    return None


def is_added(start: tf.Tensor, new: tf.Tensor) -> bool:
    """Returns whether a tensor is another one plus numbers that do not depend on it."""
    if (todo := added_to(start, new)) is None:
        return False
    seen = set()
    while todo:
        if (tensor := todo.pop()) is start:
            return False
        if tensor.ref() not in seen:
            seen.add(tensor.ref())
            todo += tensor.op.inputs
    return True


def _tensors(structure: Any) -> list[tf.Tensor]:
    leaves = [leaf for leaf in keras.tree.flatten(structure) if tf.is_tensor(leaf)]
    parts = tf.nest.flatten(leaves, expand_composites=True)
    return [tf.convert_to_tensor(part) for part in parts]  # some are variables
