"""Graphs that TensorFlow traces: operations that take or await others, graphs that are let go."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.framework.func_graph import FuncGraph, dismantle_func_graph
from tensorflow.python.framework.ops import gradient_registry
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph


def free_with(function: Any, graphs: Sequence[tf.Graph]) -> None:
    """Frees the graphs of a function, and of the loops and branches in them, when it is gone.

    `dismantle_func_graph`: a graph and its operations hold each other where Python's garbage
    collector does not see it. TensorFlow undoes that for concrete functions that one asks for, not
    for those that a `tf.function` makes when it is called, nor for loops in either.

    Args:
        function: A `tf.function`.
        graphs: Those that are traced for it; may grow later.
    """
    weakref.finalize(function, _dismantle, graphs).atexit = False


def without_tapes() -> AbstractContextManager[None]:
    """Returns a context in which no tape records: `record.stop_recording`.

    A tape's own `stop_recording` is of that tape alone; there may be others that nobody here knows.
    """
    return record.stop_recording()


def exchange_input(operation: tf.Operation, old: tf.Tensor, new: tf.Tensor) -> None:
    """Lets an operation take another tensor of the same graph: `Operation._update_input`.

    Args:
        operation: That is traced already.
        old: What it takes, perhaps several times.
        new: Of the same shape and dtype; does not depend on the operation.
    """
    for place, taken in enumerate(operation.inputs):
        if taken is old:
            operation._update_input(place, new)


def in_order_of_effects(graph: tf.Graph) -> dict[tf.Operation, list[tf.Operation]]:
    """Returns, by operation, others that it is to wait for when tracing ends: one an effect.

    `AutomaticControlDependencies`: what touches the same resource (a variable, the token of a
    device's collectives) runs in the order in which it was traced, and so do the operations that
    have an effect and touch none. Told are more than TensorFlow orders: it lets reads pass.
    """
    last: dict[Any, tf.Operation] = {}
    found = {}
    for operation in graph.get_operations():
        touched = {t.ref() for t in operation.inputs if t.dtype == tf.resource}
        if not touched and operation.op_def is not None and operation.op_def.is_stateful:
            touched = {None}
        if touched:
            found[operation] = [last[own] for own in touched if own in last]
            last |= dict.fromkeys(touched, operation)
    return found


def outermost_graph() -> tf.Graph:
    """Returns the graph of the function that is traced, not of a loop or function in it.

    `FuncGraph.outer_graph`: around the outermost is one that is traced by nobody.
    """
    graph = tf.compat.v1.get_default_graph()
    while isinstance(outer := getattr(graph, "outer_graph", None), FuncGraph):
        graph = outer
    return graph


def function_graph(operation: tf.Operation, attribute: str) -> Any:
    """Returns the graph of a function that an operation calls: `Graph._get_function`.

    Args:
        operation: Of any graph.
        attribute: The operation's attribute that names the function.

    Returns:
        A list of graphs for an attribute with several functions; None if a graph is not known.
    """
    value = operation.get_attr(attribute)

    def graph_of(name: str) -> Any:
        graph = operation.graph
        while isinstance(graph, FuncGraph):
            if (found := graph._get_function(name)) is not None:
                return getattr(found, "graph", None)
            graph = graph.outer_graph
        return None

    if isinstance(value, list):
        return [graph_of(each.name) for each in value]
    return graph_of(value.name)


def has_custom_gradient(operation: tf.Operation) -> bool:
    """Tells whether an `IdentityN` is the end of a function with a `tf.custom_gradient`."""
    with suppress(ValueError):
        return bool(operation.get_attr("_gradient_op_type"))
    return False


def run_after(operations: Sequence[tf.Operation], tensors: Sequence[tf.Tensor]) -> None:
    """Has operations run when tensors are there: `Operation._add_control_input`.

    Control dependencies are said when an operation is traced; these are, already.

    Args:
        operations: Of one graph.
        tensors: Of that graph; none depends on the operations.
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
        _forget_gradients(graph)
        dismantle_func_graph(graph)


def _forget_gradients(graph: tf.Graph) -> None:
    """Takes `tf.custom_gradient` functions, which hold their tensors, out of TensorFlow's list."""
    for operation in graph.get_operations():
        if operation.type == "IdentityN":
            with suppress(ValueError):  # it has no gradient of its own
                name = operation.get_attr("_gradient_op_type").decode()
                if name.startswith("CustomGradient-"):  # one call's; others are for many
                    gradient_registry._registry.pop(name, None)
