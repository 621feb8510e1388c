"""Graphs that TensorFlow traces: their contents, optimization, order, memory and lifetime."""

from __future__ import annotations

import graphlib
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import record
from tensorflow.python.eager.context import FunctionCallOptions, context
from tensorflow.python.eager.polymorphic_function import attributes
from tensorflow.python.framework import auto_control_deps, func_graph, op_def_registry, tensor_util
from tensorflow.python.framework.func_graph import FuncGraph, dismantle_func_graph
from tensorflow.python.framework.ops import gradient_registry
from tensorflow.python.grappler import tf_optimizer
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

from tfdist.upstream.patching import all_replaced, replaced

#: Operations that call functions.
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
LOOPS = ("While", "StatelessWhile")
#: Operations that return their inputs unchanged or with another shape.
VIEWS = (
    "Bitcast", "EnsureShape", "ExpandDims", "Identity", "IdentityN", "PreventGradient", "Reshape",
    "Snapshot", "Squeeze", "StopGradient",
)  # fmt: skip
#: Operations whose results are in memory anyway, or cost nothing to recompute.
STORED = ("Const", "Fill", "Placeholder", "ReadVariableOp", "Shape", "VarHandleOp")
#: Those of them that are stateful if their functions are.
_CALLS = {"PartitionedCall", "StatefulPartitionedCall", "While", "If", "Case"}


def kinds_of(graph: tf.Graph) -> set[str]:
    """Returns the types of all operations in a graph and in functions it calls."""
    kinds = {operation.type for operation in graph.get_operations()}
    if kinds & _CALLS:
        functions = graph.as_graph_def().library.function
        kinds |= {node.op for function in functions for node in function.node_def}
    return kinds


def calls_python(kinds: Iterable[str]) -> bool:
    """Returns whether operations of some types call Python, read an iterator, or write outside."""
    names = ("EagerPyFunc", "PyFunc", "IteratorGetNext", "Write", "LookupTableInsert", "QueueEnq")
    return any(kind.startswith(names) for kind in kinds)


def with_state(kinds: set[str]) -> set[str]:
    """Returns the stateful ones among types of operations, except calls of functions.

    Uses `op_def_registry.get`.
    """
    definitions = {kind: op_def_registry.get(kind) for kind in kinds - _CALLS}
    return {
        kind for kind, definition in definitions.items() if not definition or definition.is_stateful
    }


def functions_kept_whole() -> AbstractContextManager[None]:
    """Allows the attribute `_nospecialize` for a `tf.function` that is created and traced within.

    Without it the graph optimizer creates a separate copy of a function for each call, and of all
    functions that it calls. `attributes.parse_func_attrs` has lists of allowed attributes.
    """
    kinds = ("POLYMORPHIC_FUNCTION", "TRACING_COMPILATION", "MONOMORPHIC_FUNCTION")
    names = [f"{kind}_ALLOWLIST" for kind in kinds]
    wider = {name: getattr(attributes, name) | {"_nospecialize"} for name in names}
    return all_replaced(attributes, wider)


@contextmanager
def outputs_where_computed() -> Iterator[None]:
    """Keeps the outputs of functions that are traced within on the devices that compute them.

    `AutomaticControlDependencies.mark_as_return` adds an identity to each output that has no device
    of its own. It is placed on the default one, the first GPU, even for tensors of other GPUs.
    """
    plain = auto_control_deps.AutomaticControlDependencies.mark_as_return

    def there(self: Any, output: Any) -> Any:
        tensor = output.values if isinstance(output, tf.IndexedSlices) else output
        with tf.device(tensor.device if isinstance(tensor, tf.Tensor) else None):
            return plain(self, output)

    with replaced(auto_control_deps.AutomaticControlDependencies, "mark_as_return", there):
        yield


def optimized(graph: tf.Graph) -> tf.compat.v1.GraphDef:
    """Returns the graph of a function as TensorFlow's graph optimizer leaves it.

    By `tf_optimizer.OptimizeGraph`, as functions are optimized that are called eagerly. It keeps
    inputs, outputs and what else the function has to run (`FuncGraph.control_outputs`).
    """
    config = config_pb2.ConfigProto()
    config.ParseFromString(context().function_call_options.config_proto_serialized)
    # A second pass takes as long as the first, and removes only a fiftieth of the rest.
    options = config.graph_options.rewrite_options
    options.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
    # Without collections, in which TensorFlow puts None for each lookup table of eager mode.
    whole = tf.compat.v1.train.export_meta_graph(
        graph_def=graph.as_graph_def(), graph=graph, collection_list=[]
    )
    kept_names = [tensor.name for tensor in graph.inputs + graph.outputs]
    kept_names += [operation.name for operation in graph.control_outputs]
    whole.collection_def["train_op"].node_list.value.extend(kept_names)
    return tf_optimizer.OptimizeGraph(config, whole, verbose=False)


@contextmanager
def calls_as_traced() -> Iterator[None]:
    """Keeps functions from being optimized again where this thread calls them within the block.

    By `context.function_call_options`, which a call passes to the function that it creates.
    """
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    before = context().function_call_options
    context().function_call_options = FunctionCallOptions(before.executor_type, config)
    try:
        yield
    finally:
        context().function_call_options = before


def graphs_run_by(fn: Callable[[], object]) -> list[Any]:
    """Calls a function, and returns the optimized graphs that TensorFlow ran in it.

    `context().enable_run_metadata` and `export_run_metadata`: run metadata are no longer public in
    TensorFlow 2. They keep the graphs of functions that were first called while they were enabled,
    also if they are disabled and never exported.

    Returns:
        `RunMetadata.FunctionGraphs` messages; their `partition_graphs` are those of the devices.
    """
    context().enable_run_metadata()
    try:
        context().export_run_metadata()  # Discards the graphs of earlier runs.
        fn()
        return list(context().export_run_metadata().function_graphs)
    finally:
        context().disable_run_metadata()


@contextmanager
def seconds_of_tracing() -> Iterator[list[float]]:
    """Yields a list with one element: the CPU seconds spent on tracing functions within the block.

    Times `func_graph.func_graph_from_py_func`, and counts nested calls once.
    """
    total, around, plain = [0.0], [0], func_graph.func_graph_from_py_func

    def timed(*args: Any, **options: Any) -> Any:
        began = time.process_time()
        around[0] += 1
        try:
            return plain(*args, **options)
        finally:
            around[0] -= 1
            if not around[0]:
                total[0] += time.process_time() - began

    with replaced(func_graph, "func_graph_from_py_func", timed):
        yield total


def free_with(function: Any, graphs: Sequence[tf.Graph]) -> None:
    """Frees the graphs of a function, with their loops and branches, when it is deleted.

    `dismantle_func_graph`: a graph and its operations refer to each other in ways that Python's
    garbage collector cannot see. TensorFlow resolves this for concrete functions that are requested
    explicitly, but not for those that a `tf.function` creates when it is called, nor for loops.

    Args:
        function: A `tf.function`.
        graphs: The graphs that were traced for it; the sequence may grow later.
    """
    weakref.finalize(function, _dismantle, graphs).atexit = False


def without_tapes() -> AbstractContextManager[None]:
    """Returns a context in which no tape records: `record.stop_recording`.

    A tape's own method stops only that tape, and the caller may use others.
    """
    return record.stop_recording()


def exchange_input(operation: tf.Operation, old: tf.Tensor, new: tf.Tensor) -> None:
    """Replaces an input of an operation by another tensor: `Operation._update_input`.

    Args:
        operation: An operation that is already traced.
        old: An input of it, which may occur several times.
        new: A tensor of the same graph, shape and dtype that does not depend on the operation.
    """
    for index, current in enumerate(operation.inputs):
        if current is old:
            operation._update_input(index, new)


def kept_bytes(
    forward: Iterable[tf.Operation], backward: Iterable[tf.Operation], results: Sequence[tf.Tensor]
) -> int:
    """Returns the bytes that a forward pass keeps for the backward pass.

    Loops keep more than their graph shows: what is kept of each iteration is not counted.

    Args:
        forward: The operations of the forward pass.
        backward: Those of the backward pass.
        results: Tensors of the forward pass that are kept as well.
    """
    made, kept = set(forward), {}
    for tensor in [*results, *(tensor for operation in backward for tensor in operation.inputs)]:
        while tensor.op.type in VIEWS and len(tensor.op.inputs):
            tensor = tensor.op.inputs[tensor.value_index]
        if tensor.op in made and tensor.op.type not in STORED and tensor.shape.rank is not None:
            kept[tensor.ref()] = math.prod(n or 1 for n in tensor.shape) * tensor.dtype.size
    return sum(kept.values())


class Dependencies:
    """The dependencies between the operations of a graph that is being traced."""

    def __init__(self, graph: tf.Graph) -> None:
        self._graph, self._in_order = graph, _in_order_of_effects(graph)

    def needed(
        self, operations: Iterable[tf.Operation], known: Set[tf.Operation]
    ) -> set[tf.Operation]:
        """Returns operations and their dependencies, except the known ones and theirs."""
        needed: set[tf.Operation] = set()
        stack = [*operations]
        while stack:
            operation = stack.pop()
            if operation not in needed and operation not in known:
                needed.add(operation)
                stack += self._of(operation)
        return needed

    def first(self, operations: Iterable[tf.Operation]) -> list[tf.Operation]:
        """Returns the first operations, without constants, which use little memory."""
        nonconstant = {operation for operation in operations if self._of(operation)}
        return [o for o in nonconstant if nonconstant.isdisjoint(self._of(o))]

    def would_be_circular(
        self, added: Iterable[tuple[Sequence[tf.Operation], Sequence[tf.Tensor]]]
    ) -> bool:
        """Returns whether operations would wait for each other if they waited for more tensors.

        Args:
            added: Operations, and the tensors that these would wait for.
        """
        before = {operation: self._of(operation) for operation in self._graph.get_operations()}
        for operations, tensors in added:
            for operation in operations:
                before[operation] += [tensor.op for tensor in tensors]
        try:
            graphlib.TopologicalSorter(before).prepare()
        except graphlib.CycleError:
            return True
        return False

    def _of(self, operation: tf.Operation) -> list[tf.Operation]:
        inputs = (tensor.op for tensor in operation.inputs)
        return [*inputs, *operation.control_inputs, *self._in_order.get(operation, [])]


def _in_order_of_effects(graph: tf.Graph) -> dict[tf.Operation, list[tf.Operation]]:
    """Returns, by operation, the earlier operations that it has to wait for, one per side effect.

    Follows the rules of `AutomaticControlDependencies`: operations on the same resource (a
    variable, the token of a device's collectives) run in the order in which they were traced, and
    so do operations with side effects but without a resource. Unlike TensorFlow's, the result
    orders reads too.
    """
    last: dict[Any, tf.Operation] = {}
    before = {}
    for operation in graph.get_operations():
        touched = {t.ref() for t in operation.inputs if t.dtype == tf.resource}
        if not touched and operation.op_def is not None and operation.op_def.is_stateful:
            touched = {None}
        if touched:
            before[operation] = [last[resource] for resource in touched if resource in last]
            last |= dict.fromkeys(touched, operation)
    return before


def current_graph() -> tf.Graph | None:
    """Returns the graph that is being traced; None outside of any graph."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def traces_for_xla() -> bool:
    """Returns whether what is traced becomes part of a program of XLA.

    `control_flow_util.GraphOrParentsInXlaContext`, as TensorFlow asks where it traces branches.
    """
    graph = current_graph()
    return graph is not None and bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def outermost_graph() -> tf.Graph:
    """Returns the graph of the outermost function that is being traced, not of a loop in it.

    Follows `FuncGraph.outer_graph` up to the last graph that is itself a `FuncGraph`.
    """
    graph = tf.compat.v1.get_default_graph()
    while isinstance(outer := getattr(graph, "outer_graph", None), FuncGraph):
        graph = outer
    return graph


def constant_value(tensor: tf.Tensor) -> Any:
    """Returns the value of a tensor of a graph as an array; None if it depends on an input.

    In contrast to `tf.get_static_value`, it computes constants by `tensor_util.
    try_evaluate_constant`, such as the order of the axes in which `tf.nn.softmax` swaps two.
    """
    value = tf.get_static_value(tensor)
    return tensor_util.try_evaluate_constant(tensor) if value is None else value


def function_graph(operation: tf.Operation, attribute: str) -> Any:
    """Returns the graph of a function that an operation calls: `Graph._get_function`.

    Returns:
        A list of graphs for an attribute with several functions; None if a graph is not known.
    """
    value = operation.get_attr(attribute)

    def graph_of(name: str) -> Any:
        graph = operation.graph
        while isinstance(graph, FuncGraph):
            if (definition := graph._get_function(name)) is not None:
                return getattr(definition, "graph", None)
            graph = graph.outer_graph
        return None

    if isinstance(value, list):
        return [graph_of(each.name) for each in value]
    return graph_of(value.name)


def depends_on_inputs(function: Any) -> bool:
    """Returns whether results of a concrete function may depend on its arguments.

    Values that it captures (variables, other tensors) do not count.
    """
    graph = function.graph
    given = {tensor.op for tensor in graph.inputs[: len(graph.inputs) - len(graph.captures)]}
    todo, seen = [tensor.op for tensor in graph.outputs], set[Any]()
    while todo:
        operation = todo.pop()
        if operation in given:
            return True
        if operation not in seen:
            seen.add(operation)
            todo += [tensor.op for tensor in operation.inputs]
    return False


def is_from_half(gradient: Any) -> bool:
    """Returns whether the gradient of a float32 weight was computed in float16, and then cast.

    That of one that is read in float16 in several places is not: it is summed in float32.
    """
    if not isinstance(gradient, tf.Tensor) or gradient.dtype == tf.float16:
        return False
    if not tf.is_symbolic_tensor(gradient):
        rounded = tf.cast(tf.cast(gradient, tf.float16), gradient.dtype)
        return bool(tf.reduce_all(rounded == gradient))

    def num_casts(tensor: tf.Tensor) -> int:
        operation = tensor.op
        if operation.type in ("Identity", "Add", "AddV2", "AddN"):  # also of a regularizer
            return sum(map(num_casts, operation.inputs))
        return operation.type == "Cast" and operation.inputs[0].dtype == tf.float16

    return num_casts(gradient) == 1


def has_custom_gradient(operation: tf.Operation) -> bool:
    """Returns whether an `IdentityN` holds the outputs of a `tf.custom_gradient` function."""
    with suppress(ValueError):
        return bool(operation.get_attr("_gradient_op_type"))
    return False


def run_after(operations: Sequence[tf.Operation], tensors: Sequence[tf.Tensor]) -> None:
    """Makes operations wait for tensors: `Operation._add_control_input`.

    The public `tf.control_dependencies` has no effect on operations that are already traced.

    Args:
        operations: Operations of one graph.
        tensors: Tensors of that graph, none of which depends on the operations.
    """
    there = tf.group(tensors)
    for operation in operations:
        operation._add_control_input(there)


def _dismantle(graphs: Sequence[Any]) -> None:
    for graph in graphs:
        inner = [getattr(f, "_cached_graph", None) for f in graph._functions.values()]
        _dismantle(
            [g for g in inner if isinstance(g, ControlFlowFuncGraph) and g.outer_graph is graph]
        )
        forget_gradients(graph)
        dismantle_func_graph(graph)


def forget_gradients(graph: tf.Graph) -> None:
    """Removes `tf.custom_gradient` functions, which keep their tensors alive, from the registry.

    Args:
        graph: A graph in which no more gradients are taken. Those of functions that it calls stay,
            because others may call them, too.
    """
    for operation in graph.get_operations():
        if operation.type == "IdentityN":
            with suppress(ValueError):  # It has no custom gradient.
                name = operation.get_attr("_gradient_op_type").decode()
                if name.startswith("CustomGradient-"):  # Registered for one call.
                    gradient_registry._registry.pop(name, None)
