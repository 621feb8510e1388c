"""The operations of a traced function, as `liveness` reads them: calls and branches written out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import tensorflow as tf

from tfdist.plan.memory.liveness import Operation, Output
from tfdist.upstream.tensorflow_functions import function_called

#: What hands its input on as it is, or with another shape.
_SHARES = {
    "Bitcast", "EnsureShape", "ExpandDims", "Identity", "PreventGradient", "Reshape", "Snapshot",
    "Squeeze", "StopGradient",
}  # fmt: skip
#: What works number by number, and writes over an input that nobody else reads.
_OVERWRITES = {
    "Abs", "Add", "AddN", "AddV2", "BiasAdd", "ClipByValue", "Cos", "Div", "DivNoNan", "Elu",
    "EluGrad", "Erf", "Exp", "Expm1", "FusedBatchNormGradV3", "FusedBatchNormV3", "Inv",
    "LeakyRelu", "LeakyReluGrad", "Log", "Log1p", "LogSoftmax", "Maximum", "Minimum",
    "Mul", "MulNoNan", "Neg",
    "Pow", "RealDiv", "Reciprocal", "Relu", "Relu6", "Relu6Grad", "ReluGrad", "Rsqrt", "RsqrtGrad",
    "Select", "SelectV2", "Selu", "SeluGrad", "Sigmoid", "SigmoidGrad", "Sign", "Sin", "Softmax",
    "Softplus", "SoftplusGrad", "Sqrt", "SqrtGrad", "Square", "SquaredDifference", "Sub", "Tanh",
    "TanhGrad", "Xdivy", "Xlogy",
}  # fmt: skip
#: What reads of a tensor no more than its shape, which Grappler knows: it drops the edge.
_ONLY_SHAPE = {"OnesLike", "Rank", "Shape", "ShapeN", "Size", "ZerosLike"}
#: What lies elsewhere: variables count for themselves, and constants are small.
_ELSEWHERE = {"Const", "Placeholder", "ReadVariableOp", "VarHandleOp"}
_CALLS = {"PartitionedCall": "f", "StatefulPartitionedCall": "f"}
_BRANCHES = {"If", "StatelessIf"}
_LOOPS = {"While", "StatelessWhile"}
_NOWHERE: Mapping[Output, str] = MappingProxyType({})


def body_of_loop(graph: tf.Graph) -> tf.Graph:
    """Returns what the first loop of a graph repeats.

    Raises:
        LookupError: There is none.
    """
    loops = (op for op in graph.get_operations() if op.type in _LOOPS)
    return function_called(graph, next(loops).get_attr("body").name)


def homes_in_loop(graph: tf.Graph) -> dict[Output, str]:
    """Returns the device of each variable that the first loop of a function's graph reads.

    Args:
        graph: Of the function.

    Returns:
        By the input of the loop's body that stands for the variable.
    """
    loop = next(op for op in graph.get_operations() if op.type in _LOOPS)
    captured = {_name(inside): outside.device for outside, inside in graph.captures}
    pairs = zip(body_of_loop(graph).inputs, loop.inputs, strict=True)
    return {
        _name(inside): short(captured[_name(given)])
        for inside, given in pairs
        if given.dtype == tf.resource and _name(given) in captured
    }


def operations(graph: tf.Graph, homes: Mapping[Output, str] = _NOWHERE) -> dict[str, Operation]:
    """Returns the operations of a graph by name, and those of the functions that it calls.

    Args:
        graph: Of a function.
        homes: The devices of variables, as of `homes_in_loop`: what reads or assigns is there.
    """
    found: dict[str, Operation] = {}
    _write_out(graph, "", {}, found, homes, "")
    return found


def short(device: str) -> str:
    """Returns a device's name as `CPU:0`; of one that nobody named, nothing."""
    parsed = tf.DeviceSpec.from_string(device)
    return f"{parsed.device_type}:{parsed.device_index or 0}" if parsed.device_type else ""


def _write_out(
    graph: tf.Graph,
    prefix: str,
    outputs: dict[Output, Output],
    found: dict[str, Operation],
    homes: Mapping[Output, str],
    around: str,
) -> None:
    """Adds the operations of a graph.

    Args:
        graph: Of a function.
        prefix: Of their names, because a function may be called twice.
        outputs: Who makes what is read in this graph, where that is another than is written there.
        found: Takes them.
        homes: Of variables.
        around: The device of who calls the function, which is that of what names none.
    """
    live = _live(graph)
    for op in graph.get_operations():
        if op.name not in live:
            continue
        inputs = [outputs.get(read, (prefix + read[0], read[1])) for read in map(_name, op.inputs)]
        after = [prefix + other.name for other in op.control_inputs]
        home = next((homes[read] for read in inputs if read in homes), "")
        device = home or short(op.device) or around
        if op.type in _CALLS or op.type in _BRANCHES:
            attribute = _CALLS.get(op.type, "then_branch")  # what a step does; else: it is left out
            called = function_called(graph, op.get_attr(attribute).name)
            inner = f"{prefix}{op.name}/"
            given = inputs[1:] if op.type in _BRANCHES else inputs
            inside = {_name(to): come for to, come in zip(called.inputs, given, strict=True)}
            _write_out(called, inner, inside, found, homes, device)
            for number, made in enumerate(called.outputs):
                key = _name(made)
                outputs[op.name, number] = inside.get(key, (inner + key[0], key[1]))
            # Whoever waits for the call waits for all that it does.
            own = [name for name in found if name.startswith(inner)]
            found[prefix + op.name] = Operation("NoOp", [], [*own, *after], [], device=device)
            continue
        if op.type in _ONLY_SHAPE and all(t.shape.is_fully_defined() for t in op.inputs):
            inputs = []
        found[prefix + op.name] = Operation(
            op.type, inputs, after, list(map(_size, op.outputs)), op.type in _SHARES,
            op.type in _OVERWRITES, op.type in _ELSEWHERE, device,
        )  # fmt: skip


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
