"""Tensors that a step computes on its GPU and the host needs, by TensorFlow's kernel registry.

Each is a copy for which the host waits until the GPU has computed it, and meanwhile queues nothing
that needs it. Kernels for a GPU take some inputs from host memory, such as the condition of a
branch and all of int32 that TensorFlow expects to be shapes: its registry says which.
"""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from tfdist.upstream.tensorflow_graphs import function_graph
from tfdist.upstream.tensorflow_runtime import inputs_in_host_memory, outputs_in_host_memory

#: Operations that call functions, and arguments of functions: they compute no tensor themselves.
_LOOPS, _BRANCHES = {"While", "StatelessWhile"}, {"If", "StatelessIf"}
_FUNCTIONS = {"Placeholder", "PartitionedCall", "StatefulPartitionedCall", *_LOOPS, *_BRANCHES}


def copies(graph: tf.Graph) -> list[str]:
    """Returns the copies to the host in a traced graph, and in the functions that it calls.

    Args:
        graph: Its operations count as those of a GPU, except the ones on `CPU:0`.

    Returns:
        The types of the operations before and after each copy: `"LogicalNot -> If"`.
    """
    results = []
    for inner, is_condition in _functions(graph):
        copied = set()
        for operation in inner.get_operations():
            for number, tensor in enumerate(operation.inputs):
                if not _is_on_host(tensor) and _needs_on_host(operation, number):
                    copied.add((tensor.ref(), operation.type))
        if is_condition and not _is_on_host(inner.outputs[0]):
            copied.add((inner.outputs[0].ref(), "LoopCond"))
        results += [f"{tensor.deref().op.type} -> {kind}" for tensor, kind in copied]
    return sorted(results)


def _functions(graph: tf.Graph, is_condition: bool = False) -> Iterator[tuple[tf.Graph, bool]]:
    """Yields a graph and the functions that it calls, and whether each is a loop's condition."""
    yield graph, is_condition
    for operation in graph.get_operations():
        for name, attribute in operation.node_def.attr.items():
            if attribute.WhichOneof("value") == "func" and attribute.func.name:
                called = function_graph(operation, name)
                yield from _functions(called, name == "cond" and operation.type in _LOOPS)


def _is_on_host(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor is computed in host memory; true for those of functions."""
    operation = tensor.op
    if operation.device.endswith("CPU:0") or operation.type in _FUNCTIONS:
        return True
    return outputs_in_host_memory(operation)[tensor.value_index]


def _needs_on_host(operation: tf.Operation, number: int) -> bool:
    """Returns whether an operation takes an input from host memory."""
    if operation.device.endswith("CPU:0"):
        return True
    if operation.type in _FUNCTIONS:
        return operation.type in _BRANCHES and number == 0
    return inputs_in_host_memory(operation)[number]
