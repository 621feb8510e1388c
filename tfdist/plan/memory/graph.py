"""The operations of a traced function, as `liveness` reads them: calls and branches written out."""

from __future__ import annotations

import math

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


def body_of_loop(graph: tf.Graph) -> tf.Graph:
    """Returns what the first loop of a graph repeats.

    Raises:
        LookupError: There is none.
    """
    loops = (op for op in graph.get_operations() if op.type in _LOOPS)
    return function_called(graph, next(loops).get_attr("body").name)


def operations(graph: tf.Graph) -> dict[str, Operation]:
    """Returns the operations of a graph by name, and those of the functions that it calls."""
    found: dict[str, Operation] = {}
    _write_out(graph, "", {}, found)
    return found


def _write_out(
    graph: tf.Graph, prefix: str, outputs: dict[Output, Output], found: dict[str, Operation]
) -> None:
    """Adds the operations of a graph.

    Args:
        graph: Of a function.
        prefix: Of their names, because a function may be called twice.
        outputs: Who makes what is read in this graph, where that is another than is written there.
        found: Takes them.
    """
    for op in graph.get_operations():
        inputs = [outputs.get(read, (prefix + read[0], read[1])) for read in map(_name, op.inputs)]
        after = [prefix + other.name for other in op.control_inputs]
        if op.type in _CALLS or op.type in _BRANCHES:
            attribute = _CALLS.get(op.type, "then_branch")  # what a step does; else: it is left out
            called = function_called(graph, op.get_attr(attribute).name)
            inner = f"{prefix}{op.name}/"
            given = inputs[1:] if op.type in _BRANCHES else inputs
            inside = {_name(to): come for to, come in zip(called.inputs, given, strict=True)}
            _write_out(called, inner, inside, found)
            for number, made in enumerate(called.outputs):
                key = _name(made)
                outputs[op.name, number] = inside.get(key, (inner + key[0], key[1]))
            # Whoever waits for the call waits for all that it does.
            own = [name for name in found if name.startswith(inner)]
            found[prefix + op.name] = Operation("NoOp", [], [*own, *after], [])
            continue
        if op.type in _ONLY_SHAPE and all(t.shape.is_fully_defined() for t in op.inputs):
            inputs = []
        sizes = [0] * len(op.outputs) if op.type in _ELSEWHERE else list(map(_size, op.outputs))
        found[prefix + op.name] = Operation(
            op.type, inputs, after, sizes, op.type in _SHARES, op.type in _OVERWRITES
        )


def _name(tensor: tf.Tensor) -> Output:
    return tensor.op.name, tensor.value_index


def _size(tensor: tf.Tensor) -> int:
    """Bytes of a tensor; 0 of a handle, and of one whose shape nobody knows."""
    if tensor.dtype in (tf.resource, tf.variant, tf.string) or not tensor.shape.is_fully_defined():
        return 0
    return math.prod(tensor.shape.as_list()) * tensor.dtype.size
