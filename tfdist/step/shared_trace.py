"""One trace for all replicas of a process: what each computes is one function of its variables.

Traced by itself, a forward and backward pass is there once a replica: tracing takes as much time
again for each of them, and TensorFlow's graph optimizer more than that, since it sees all as one
graph. Here it is traced once, as a function that is not inlined, and called on every device with
that device's copies in the place of the variables that the trace has read. Gradients are taken
inside, so that no backward function is traced for the calls.

A call takes the handles of all its variables in one tensor. By itself each of them would be several
operations of the graph around the calls, for each device: most of what is in it.

Contributions that one trace computes for all replicas, in few tensors from end to end.

The gradients of a network are hundreds, and so are the operations that pack them to be summed, and
take them apart again. They stand in the functions that are called on each device: between two of
those, only the sums are in the graph that grows with the replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.groups.fusion import packed
from tfdist.step.forward_backward import ReplicaOutputs, shaped
from tfdist.strategies.mirrored_variables import copies_of, local, on_device
from tfdist.upstream.tensorflow_functions import (
    calls_as_traced,
    functions_kept_whole,
    kinds_of,
    optimized,
    with_state,
)

#: Operations that have state but change none, wherever and however often they run.
_READS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "Assert"}

#: Loops and branches: the graph optimizer leaves them as merges, and of those no function is made.
_BRANCHES = {"While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase"}

_WHOLE = {"_noinline": True, "_nospecialize": True}


class NotShareableError(Exception):
    """What is traced needs something of other replicas, which only a trace of its own can get."""


class _Traced(NamedTuple):
    function: Any  # a `tf.types.experimental.ConcreteFunction`
    together: list[tf.Variable]  # of which it takes the handles as its first argument, if any
    captured: list[Any]  # other variables, and tensors that are the same on every replica
    is_final: bool  # whether its calls are not to be optimized


class SharedTrace:
    """Calls a function on replicas, traced for the first of them.

    Args:
        fn: Takes tensors, and all that is different on each replica as one of them.
        min_operations: Operations of a function that is worth a call.
        writes: Whether it may assign to variables of which each replica has a copy.
    """

    def __init__(self, fn: Callable[..., Any], min_operations: int, writes: bool = False) -> None:
        self._fn, self._writes, self._min_operations = fn, writes, min_operations
        self._traced: dict[str, _Traced | None] = {}

    def __call__(self, *arguments: Any) -> Any | None:
        """Returns what the function comes to; called in a graph, on a replica.

        Args:
            arguments: Structures of tensors.

        Returns:
            Its result; None where this replica has to be traced by itself: sums cross in between,
            operations draw from a state of their own, or TensorFlow refuses.
        """
        key = str(tf.nest.map_structure(_spec, arguments))
        if key not in self._traced:
            self._traced[key] = self._trace(arguments)
        if (traced := self._traced[key]) is None:
            return None
        traced.function.set_external_captures(
            [local(c).handle if isinstance(c, tf.Variable) else c for c in traced.captured]
        )
        handles = [_handles(traced.together)] if traced.together else []
        with calls_as_traced() if traced.is_final else nullcontext():
            return traced.function(*handles, *arguments)

    def _trace(self, arguments: Any) -> _Traced | None:
        # To optimize it once, outside of the step, TensorFlow opens a session on all GPUs of the
        # host, whether they are this process's or not: where there are any each call is optimized.
        is_final = not tf.config.list_physical_devices("GPU")
        try:
            # Operations get no device, so that each call has its own.
            with tf.device(None), on_device(""), functions_kept_whole():
                traced = _function(self._fn).get_concrete_function(*arguments)
                if not self._is_for_all(traced):
                    return None
                variables = {id(v.handle): v for v in traced.graph.variables}
                function, together = traced, list[tf.Variable]()
                if is_final:
                    together = [v for v in variables.values() if copies_of(v)]
                    plain = traced.graph.as_graph_def
                    definition = plain() if self._writes else optimized(traced.graph)
                    function = _again(traced, definition, together, arguments)
        except Exception:  # whatever it is: a replica that is traced by itself says it better
            return None
        captured = [variables.get(id(tensor), tensor) for tensor in function.captured_inputs]
        return _Traced(function, together, captured, is_final)

    def _is_for_all(self, traced: Any) -> bool:
        """Whether a function is worth a call, and has no state but that of the variables."""
        graph = traced.graph
        if len(graph.get_operations()) < self._min_operations:
            return False
        variables = {id(variable.handle) for variable in graph.variables}
        others = [tensor for tensor in traced.captured_inputs if id(tensor) not in variables]
        if any(tf.is_symbolic_tensor(t) or t.dtype == tf.resource for t in others):
            return False  # of the graph around this call, or a table and the like
        kinds = kinds_of(graph)
        if kinds & _BRANCHES:
            return False
        kinds = with_state(kinds) - _READS
        return not kinds or (self._writes and all(map(_assigns, kinds)))


def _again(
    traced: Any, definition: tf.compat.v1.GraphDef, together: list[tf.Variable], arguments: Any
) -> Any:
    """Returns a function that computes the same as another by a graph of ours.

    Args:
        traced: The other.
        definition: Of the graph, with the names that it has in that function. It may be optimized:
            otherwise that is done for each call, again.
        together: Of variables that it has captured; the new function takes their handles in one
            tensor, before the other arguments, if there are any.
        arguments: As it was traced for.
    """
    graph = traced.graph
    names = [tensor.name for tensor in graph.inputs]
    inputs = {name.partition(":")[0] for name in names}
    for place in reversed([i for i, node in enumerate(definition.node) if node.name in inputs]):
        del definition.node[place]
    for node in definition.node:
        node.input[:] = [s for s in node.input if not (s[:1] == "^" and s[1:] in inputs)]
    read = {source.partition(":")[0] for node in definition.node for source in node.input}
    results = [tensor.name for tensor in graph.outputs]
    computed = [name for name in results if name not in names]

    def again(*given: Any) -> Any:
        handles: dict[int, tf.Tensor] = {}
        if together:
            own = tf.raw_ops.Unpack(value=given[0], num=len(together), axis=0)
            handles = {id(v.handle): one for v, one in zip(together, own, strict=True)}
        rest = tf.nest.flatten(given[1:] if together else given, expand_composites=True)
        capture = tf.compat.v1.get_default_graph().capture
        captured = [
            handles[id(tensor)] if id(tensor) in handles else capture(tensor)
            for tensor in traced.captured_inputs
        ]
        values = dict(zip(names, [*_tensors(rest), *captured], strict=True))
        mapped = {name: v for name, v in values.items() if name.partition(":")[0] in read}
        found = tf.graph_util.import_graph_def(definition, mapped, computed, name="traced")
        values |= dict(zip(computed, found, strict=True))
        for tensor in graph.outputs:
            values[tensor.name].set_shape(tensor.shape)
        return tf.nest.pack_sequence_as(
            traced.structured_outputs, [values[name] for name in results], expand_composites=True
        )

    handles = [tf.TensorSpec([len(together)], tf.resource)] if together else []
    return _function(again).get_concrete_function(*handles, *arguments)


def _handles(variables: list[tf.Variable]) -> tf.Tensor:
    """Returns the handles of this replica's copies, outside of the graph that is traced."""
    with tf.init_scope(), tf.device(None):
        return tf.raw_ops.Pack(values=[local(v).handle for v in variables], axis=0)


def _function(fn: Callable[..., Any]) -> Any:
    return tf.function(fn, autograph=False, experimental_attributes=_WHOLE)


def _tensors(values: list[Any]) -> list[tf.Tensor]:
    return [value for value in values if isinstance(value, tf.Tensor)]


def _assigns(kind: str) -> bool:
    """Whether operations of a kind change a variable that they are given, and nothing else."""
    return kind.startswith(("Assign", "ResourceApply", "ResourceSparseApply", "ResourceScatter"))


def _spec(value: Any) -> Any:
    return None if value is None else tf.type_spec_from_value(value)


class Packed(NamedTuple):
    """A share's contribution, or the sum of several.

    Attributes:
        sent: What is to be summed, in few tensors.
        same: The rest of the contribution, which is the same on every share.
    """

    sent: list[Any]
    same: ReplicaOutputs


class PackedRunner:
    """Computes contributions by one trace, packed.

    Args:
        contribution: Returns what a share contributes. Takes the index of the replica, the rows of
            the batch, the number of the round and the share; raises `NotShareableError` where it
            needs something of other replicas.
        variables: What the gradients are of, by place.
        min_operations: As of `SharedTrace`.
    """

    def __init__(
        self,
        contribution: Callable[..., ReplicaOutputs],
        variables: Sequence[keras.Variable],
        min_operations: int,
    ) -> None:
        self._contribution, self._variables = contribution, variables
        self._shared_trace = SharedTrace(self._packed, min_operations)
        self._like: ReplicaOutputs | None = None
        self._apart: Callable[[list], list] = list

    def __call__(self, index: int, total_rows: tf.Tensor, number: Any, share: Any) -> Packed | None:
        """Returns what a share contributes; None: it has to be computed by itself."""
        if tf.executing_eagerly():
            return None
        return self._shared_trace(
            tf.constant(index), total_rows, tf.convert_to_tensor(number), share
        )

    def unpacked(self, share: Packed) -> ReplicaOutputs:
        """Returns a contribution, or a sum of them, with each tensor by itself."""
        apart = self._apart(list(share.sent))
        found = tf.nest.pack_sequence_as(self._like, apart).with_same(share.same)
        # Of slices that a function returns, TensorFlow no longer knows what they are slices of.
        gradients = {
            i: shaped(gradient, self._variables[i])
            if isinstance(gradient, tf.IndexedSlices)
            else gradient
            for i, gradient in found.gradients.items()
        }
        return found._replace(gradients=gradients)

    def _packed(self, *arguments: Any) -> Packed:
        found = self._contribution(*arguments)
        summable = found.summable()
        like = tf.nest.map_structure(lambda _: 0, summable)
        if self._like not in (None, like):
            raise NotShareableError("another batch contributes other things.")
        self._like = like
        sent, self._apart = packed(tf.nest.flatten(summable))
        return Packed(sent, found.same())
