"""Kinds of operations, by what becomes of their inputs and outputs. Imports no TensorFlow."""

from __future__ import annotations

#: What hands its input on as it is, or with another shape.
SHARES = {
    "Bitcast", "EnsureShape", "ExpandDims", "Identity", "PreventGradient", "Reshape", "Snapshot",
    "Squeeze", "StopGradient",
}  # fmt: skip
#: What works number by number, and writes over an input that nobody else reads.
OVERWRITES = {
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
ONLY_SHAPE = {"OnesLike", "Rank", "Shape", "ShapeN", "Size", "ZerosLike"}
#: What lies elsewhere: variables count for themselves, and constants are small.
ELSEWHERE = {"Const", "Placeholder", "ReadVariableOp", "VarHandleOp"}
CALLS = {"PartitionedCall": "f", "StatefulPartitionedCall": "f"}
BRANCHES = {"If", "StatelessIf"}
LOOPS = {"While", "StatelessWhile"}
