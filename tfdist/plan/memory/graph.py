"""The operations of a traced function, as `liveness` reads them: calls and branches written out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import tensorflow as tf

from tfdist.plan.memory import cpu_kernels, kinds
from tfdist.plan.memory.operations import Operation, Output
from tfdist.upstream.tensorflow_functions import function_called

_NOWHERE: Mapping[Output, str] = MappingProxyType({})


def body_of_loop(graph: tf.Graph) -> tf.Graph:
    """Returns what the first loop of a graph repeats.

    Raises:
        LookupError: There is none.
    """
    loops = (op for op in graph.get_operations() if op.type in kinds.LOOPS)
    return function_called(graph, next(loops).get_attr("body").name)


def homes_in_loop(graph: tf.Graph) -> dict[Output, str]:
    """Returns the device of each variable that the first loop of a function's graph reads.

    Args:
        graph: Of the function.

    Returns:
        By the input of the loop's body that stands for the variable.
    """
    loop = next(op for op in graph.get_operations() if op.type in kinds.LOOPS)
    captured = {_name(inside): outside.device for outside, inside in graph.captures}
    pairs = zip(body_of_loop(graph).inputs, loop.inputs, strict=True)
    return {
        _name(inside): short(captured[_name(given)])
        for inside, given in pairs
        if given.dtype == tf.resource and _name(given) in captured
    }


def operations(
    graph: tf.Graph, homes: Mapping[Output, str] = _NOWHERE, cpus: int = 0
) -> dict[str, Operation]:
    """Returns the operations of a graph by name, and those of the functions that it calls.

    Args:
        graph: Of a function.
        homes: The devices of variables, as of `homes_in_loop`: what reads or assigns is there.
        cpus: Threads of a CPU, whose kernels take workspaces; 0: of another device.
    """
    writer = _Writer(homes, cpus)
    writer.write_out(graph, "", {}, "")
    return writer.found


def short(device: str) -> str:
    """Returns a device's name as `CPU:0`; of one that nobody named, nothing."""
    parsed = tf.DeviceSpec.from_string(device)
    return f"{parsed.device_type}:{parsed.device_index or 0}" if parsed.device_type else ""


class _Writer:
    """Writes out the operations of graphs and of what these call.

    Args:
        homes: Of variables.
        cpus: As of `operations`.

    Attributes:
        found: The operations.
    """

    def __init__(self, homes: Mapping[Output, str], cpus: int) -> None:
        self._homes, self._cpus = homes, cpus
        self.found: dict[str, Operation] = {}

    def write_out(
        self, graph: tf.Graph, prefix: str, outputs: dict[Output, Output], around: str
    ) -> None:
        """Adds the operations of a graph.

        Args:
            graph: Of a function.
            prefix: Of their names, because a function may be called twice.
            outputs: Who makes what is read in this graph, where that is another than is written
                there.
            around: The device of who calls the function, which is that of what names none.
        """
        live = _live(graph)
        for op in graph.get_operations():
            if op.name not in live:
                continue
            reads = map(_name, op.inputs)
            inputs = [outputs.get(read, (prefix + read[0], read[1])) for read in reads]
            after = [prefix + other.name for other in op.control_inputs]
            home = next((self._homes[read] for read in inputs if read in self._homes), "")
            device = home or short(op.device) or around
            if op.type in kinds.CALLS or op.type in kinds.BRANCHES:
                inner = f"{prefix}{op.name}/"
                given = inputs[1:] if op.type in kinds.BRANCHES else inputs
                self._call(graph, op, inner, given, outputs, device)
                # Whoever waits for the call waits for all that it does.
                own = [name for name in self.found if name.startswith(inner)]
                waits = Operation("NoOp", [], [*own, *after], [], device=device)
                self.found[prefix + op.name] = waits
            else:
                self.found[prefix + op.name] = self._one(op, inputs, after, device)

    def _call(
        self,
        graph: tf.Graph,
        op: tf.Operation,
        inner: str,
        given: list[Output],
        outputs: dict[Output, Output],
        device: str,
    ) -> None:
        """Adds what an operation calls, and says who makes its outputs."""
        # Of a branch, what a step does; the other is that it is left out.
        attribute = kinds.CALLS.get(op.type, "then_branch")
        called = function_called(graph, op.get_attr(attribute).name)
        inside = {_name(to): come for to, come in zip(called.inputs, given, strict=True)}
        self.write_out(called, inner, inside, device)
        for number, made in enumerate(called.outputs):
            key = _name(made)
            outputs[op.name, number] = inside.get(key, (inner + key[0], key[1]))

    def _one(
        self, op: tf.Operation, inputs: list[Output], after: list[str], device: str
    ) -> Operation:
        """An operation that calls nothing."""
        known = all(t.shape.is_fully_defined() for t in (*op.inputs, *op.outputs))
        if op.type in kinds.ONLY_SHAPE and known:
            inputs = []
        one = Operation(
            op.type, inputs, after, list(map(_size, op.outputs)), op.type in kinds.SHARES,
            op.type in kinds.OVERWRITES, op.type in kinds.ELSEWHERE, device,
        )  # fmt: skip
        if not self._cpus or not known:
            return one
        if kept := cpu_kernels.places_kept(op):
            return one._replace(sizes=[*one.sizes, kept])
        pooled = self.found.get(inputs[1][0]) if op.type == "MaxPoolGrad" else None
        if pooled is not None and len(pooled.sizes) > 1:
            one = one._replace(inputs=[*inputs, (inputs[1][0], 1)])
        return one._replace(
            workspaces=cpu_kernels.workspaces(op, self._cpus), work=cpu_kernels.work(op)
        )


def _live(graph: tf.Graph) -> set[str]:
    """The names of what somebody needs: what is returned, what has effects, and what these read.

    TensorFlow drops the rest before it computes (`PruneFunctionBody`, declared in
    `tensorflow/core/common_runtime/function_def_utils.h`): gradients of inputs, mostly.
    """
    found: set[str] = set()
    asked = [tensor.op for tensor in graph.outputs]
    asked += [op for op in graph.get_operations() if op.op_def.is_stateful]
    while asked:
        op = asked.pop()
        if op.name not in found:
            found.add(op.name)
            asked += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return found


def _name(tensor: tf.Tensor) -> Output:
    return tensor.op.name, tensor.value_index


def _size(tensor: tf.Tensor) -> int:
    """Bytes of a tensor; 0 of a handle, and of one whose shape nobody knows."""
    if tensor.dtype in (tf.resource, tf.variant, tf.string) or not tensor.shape.is_fully_defined():
        return 0
    return math.prod(tensor.shape.as_list()) * tensor.dtype.size
