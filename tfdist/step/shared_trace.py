"""One trace of a function for all replicas of a process.

Without it, the graph holds the forward and backward pass once per replica: tracing takes that many
times as long, and TensorFlow's graph optimizer, which sees all of it as one graph, longer still.
Here the function is traced once, is not inlined, and is called on every device with that device's
variables in place of those that the trace has read. Gradients are computed inside of it, so that
TensorFlow traces no backward function for the calls.

A call takes the handles of all its variables in one tensor. One argument per variable would add
several operations per variable and device to the outer graph, more than all its other operations.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.groups.fusion import has_size, packed
from tfdist.patches.sizes_on_host import has_gpus
from tfdist.step.forward_backward import ReplicaOutputs
from tfdist.strategies import mirrored_variables
from tfdist.upstream.tensorflow_graphs import (
    BRANCHES,
    LOOPS,
    calls_as_traced,
    forget_gradients,
    functions_kept_whole,
    kinds_of,
    optimized,
    with_state,
)
from tfdist.upstream.tensorflow_random import RandomStates

logger = logging.getLogger(__name__)

#: Operations that have state but change none, wherever and however often they run.
_READS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "Assert"}

#: Prefixes of operations that only change a variable that they are given.
_ASSIGNS = ("Assign", "ResourceApply", "ResourceSparseApply", "ResourceScatter")

#: The graph optimizer lowers them to merges, which no function can hold.
_CONTROL_FLOW = {*BRANCHES, *LOOPS}

_NOT_INLINED = {"_noinline": True, "_nospecialize": True}


class NotShareableError(Exception):
    """The traced function differs between replicas, or exchanges something with the others."""


class _Traced(NamedTuple):
    """A traced function and what to pass to its calls.

    Attributes:
        function: A `tf.types.experimental.ConcreteFunction`.
        variables: Those whose handles are its first argument, stacked; may be empty.
        captured: Other variables, and tensors that are the same on every replica.
        is_optimized: Whether the function is optimized, so that its calls need not be.
    """

    function: Any
    variables: list[tf.Variable]
    captured: list[Any]
    is_optimized: bool


class SharedTrace:
    """Calls a function on every replica, traced for the first of them.

    Args:
        fn: Takes structures of tensors, among them all that differs between replicas.
        writes: Whether the function may assign to variables of which each replica has a copy.
    """

    def __init__(self, fn: Callable[..., Any], writes: bool = False) -> None:
        self._fn, self._writes = fn, writes
        self._traced: dict[str, _Traced | None] = {}

    def __call__(self, *arguments: Any) -> Any | None:
        """Calls the function; to be used in a graph, on a replica.

        Args:
            arguments: Structures of tensors.

        Returns:
            The function's result, or None where this replica needs a trace of its own. The reason
            is logged once.
        """
        key = str(tf.nest.map_structure(_spec, arguments))
        if key not in self._traced:
            self._traced[key] = self._trace(arguments)
        if (traced := self._traced[key]) is None:
            return None
        traced.function.set_external_captures(
            [
                mirrored_variables.local(c).handle if isinstance(c, tf.Variable) else c
                for c in traced.captured
            ]
        )
        handles = []  # those of this replica's variables, made outside of the traced graph
        if traced.variables:
            local = [mirrored_variables.local(v).handle for v in traced.variables]
            with tf.init_scope(), tf.device(None):
                handles.append(tf.raw_ops.Pack(values=local, axis=0))
        with calls_as_traced() if traced.is_optimized else nullcontext():
            return traced.function(*handles, *arguments)

    def _trace(self, arguments: Any) -> _Traced | None:
        """Returns the trace for arguments like these; None after logging why there is none."""
        states = RandomStates.current()
        try:
            return self._trace_once(arguments)
        except NotShareableError as reason:
            logger.info("Each replica is traced by itself: %s.", reason)
        except Exception as error:
            # An error of the user's code is raised again by the replica's own trace, with a
            # traceback that has only the user's code in it.
            logger.info("Each replica is traced by itself: tracing for all failed: %s", error)
            logger.debug("The failed trace:", exc_info=True)
        states.restore()  # the replicas draw the same numbers when they are traced
        return None

    def _trace_once(self, arguments: Any) -> _Traced:
        # To optimize the function, TensorFlow opens a session on all GPUs of the host, including
        # those of other processes. With GPUs, every call is optimized instead.
        is_optimized = not has_gpus()
        # Operations get no device, so that each call runs on its own.
        with tf.device(None), mirrored_variables.on_device(""), functions_kept_whole():
            traced = _function(self._fn).get_concrete_function(*arguments)
            forget_gradients(traced.graph)  # the function has taken its own
            self._check_shareable(traced)
            by_handle = {id(v.handle): v for v in traced.graph.variables}
            function, variables = traced, list[tf.Variable]()
            if is_optimized:
                variables = [v for v in by_handle.values() if mirrored_variables.copies_of(v)]
                plain = traced.graph.as_graph_def
                definition = plain() if self._writes else optimized(traced.graph)
                function = _rebuilt(traced, definition, variables, arguments)
        captured = [by_handle.get(id(tensor), tensor) for tensor in function.captured_inputs]
        return _Traced(function, variables, captured, is_optimized)

    def _check_shareable(self, traced: Any) -> None:
        """Checks that a function has no state except that of variables."""
        graph = traced.graph
        variables = {id(variable.handle) for variable in graph.variables}
        others = [tensor for tensor in traced.captured_inputs if id(tensor) not in variables]
        for tensor in others:
            if tf.is_symbolic_tensor(tensor):
                raise NotShareableError(f"the function reads {tensor.name!r} of the outer graph")
            if tensor.dtype == tf.resource:
                raise NotShareableError("the function uses a resource that is not a variable")
        kinds = kinds_of(graph)
        if branches := kinds & _CONTROL_FLOW:
            raise NotShareableError(
                f"the function has control flow ({', '.join(sorted(branches))})"
            )
        stateful = with_state(kinds) - _READS
        if self._writes:
            stateful = {kind for kind in stateful if not kind.startswith(_ASSIGNS)}
        if stateful:
            names = ", ".join(sorted(stateful))
            raise NotShareableError(f"the function has operations with a state ({names})")


class Packing:
    """Packs what a replica computes into few tensors, and unpacks their sums.

    A network has hundreds of gradients, and as many operations to concatenate them for the
    all-reduce and to split them again. Packed, these are part of the functions that are called on
    each device, and only the sums are in the outer graph, which grows with the replicas.
    """

    def __init__(self) -> None:
        self._structure: ReplicaOutputs | None = None
        self._specs: list[Any] = []
        self._unpack: Callable[[list], list] = list

    def packed(self, outputs: ReplicaOutputs) -> ReplicaOutputs:
        """Returns outputs packed, or as they are if an earlier batch had others."""
        summable = outputs.summable()
        structure = tf.nest.map_structure(lambda _: 0, summable)
        tensors = tf.nest.flatten(summable)
        specs = [(t.dtype, has_size(t) and tuple(t.shape)) for t in tensors]
        if self._structure is None:
            self._structure, self._specs = structure, specs
        elif (self._structure, self._specs) != (structure, specs):
            return outputs
        packs, self._unpack = packed(tensors)
        return outputs.same()._replace(packed=packs)

    def unpacked(self, outputs: ReplicaOutputs) -> ReplicaOutputs:
        """Returns outputs, or a sum of them, with a tensor for each gradient and state."""
        if not outputs.packed:
            return outputs
        tensors = self._unpack(list(outputs.packed))
        return tf.nest.pack_sequence_as(self._structure, tensors).with_same(outputs)


def _rebuilt(
    traced: Any,
    definition: tf.compat.v1.GraphDef,
    variables: list[tf.Variable],
    arguments: Any,
) -> Any:
    """Returns a function that computes what another does, from a definition of its graph.

    Args:
        traced: The other function.
        definition: Its graph, with the same names; may be optimized, so that TensorFlow need not
            optimize every call.
        variables: Variables that it captured. If there are any, the new function takes their
            handles as its first argument, in one tensor.
        arguments: Those for which it was traced.
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

    def rebuilt(*given: Any) -> Any:
        handles: dict[int, tf.Tensor] = {}
        if variables:
            unstacked = tf.raw_ops.Unpack(value=given[0], num=len(variables), axis=0)
            handles = {id(v.handle): one for v, one in zip(variables, unstacked, strict=True)}
        rest = tf.nest.flatten(given[1:] if variables else given, expand_composites=True)
        capture = tf.compat.v1.get_default_graph().capture
        captured = [
            handles[id(tensor)] if id(tensor) in handles else capture(tensor)
            for tensor in traced.captured_inputs
        ]
        tensors = [value for value in rest if isinstance(value, tf.Tensor)]
        values = dict(zip(names, [*tensors, *captured], strict=True))
        mapped = {name: v for name, v in values.items() if name.partition(":")[0] in read}
        imported = tf.graph_util.import_graph_def(definition, mapped, computed, name="traced")
        values |= dict(zip(computed, imported, strict=True))
        for tensor in graph.outputs:
            values[tensor.name].set_shape(tensor.shape)
        return tf.nest.pack_sequence_as(
            traced.structured_outputs, [values[name] for name in results], expand_composites=True
        )

    handles = [tf.TensorSpec([len(variables)], tf.resource)] if variables else []
    return _function(rebuilt).get_concrete_function(*handles, *arguments)


def _function(fn: Callable[..., Any]) -> Any:
    return tf.function(fn, autograph=False, experimental_attributes=_NOT_INLINED)


def _spec(value: Any) -> Any:
    return None if value is None else tf.type_spec_from_value(value)
