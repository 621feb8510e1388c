"""Rules of operations on single elements of tensors, and of constants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.rows import dependence
from tfdist.rows.dependence import (
    FREE,
    UNKNOWN,
    ZERO,
    Dependence,
    Kind,
    Rule,
    Values,
    given_plain,
    size,
    with_power,
    without_factor,
    worst,
)

#: Functions of single elements of their inputs.
_ELEMENTWISE = """
Abs Acos Acosh AsString Asin Asinh Atan Atan2 Atanh Betainc BitwiseAnd BitwiseOr BitwiseXor
Bucketize Ceil CheckNumerics ClipByValue Complex ComplexAbs Cos Cosh Digamma Elu EluGrad Equal Erf
Erfc Erfinv Exp Expm1 Floor FloorDiv FloorMod Greater GreaterEqual Igamma Igammac Imag Inv InvGrad
Invert IsFinite IsInf IsNan LeakyRelu LeakyReluGrad LeftShift Less LessEqual Lgamma Log Log1p
LogicalAnd LogicalNot LogicalOr Mod Ndtri NotEqual Polygamma Pow Reciprocal
ReciprocalGrad RegexFullMatch RegexReplace Relu Relu6 Relu6Grad ReluGrad RightShift Rint Round
Rsqrt RsqrtGrad Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Softplus SoftplusGrad Softsign
SoftsignGrad Sqrt SqrtGrad Square SquaredDifference StaticRegexFullMatch StaticRegexReplace
StringLength StringLower StringStrip StringToHashBucketFast StringToHashBucketStrong StringToNumber
StringUpper Tan Tanh TanhGrad TruncateDiv TruncateMod Xdivy Xlog1py Xlogy Zeta
"""

#: Linear functions of single elements, and tensors as they are.
_LINEAR = """
Conj EnsureShape Identity PlaceholderWithDefault PreventGradient Real Snapshot StopGradient
"""


def elementwise_rule(op: Any, values: Values) -> Dependence:
    """Returns the class of a function of the single elements of all inputs of an operation."""
    return dependence.elementwise(op.inputs, values, op.outputs[0])


def _added(op: Any, values: Values) -> Dependence:
    total = dependence.added(op.inputs, values, op.outputs[0])
    return without_factor(total) if op.type == "Sub" else total


def _extreme(op: Any, values: Values) -> Dependence:
    """`Maximum` and `Minimum`, also of two equal sizes."""
    is_size = values[0].kind is Kind.FREE and values[0].factor is not None
    return values[0] if is_size and values[0] == values[1] else elementwise_rule(op, values)


def _cast(op: Any, values: Values) -> Dependence:
    to_float = op.outputs[0].dtype.is_floating or op.outputs[0].dtype.is_complex
    from_sum = values[0].kind is Kind.SUMMED and not op.inputs[0].dtype.is_bool
    if to_float and (from_sum or values[0].kind is not Kind.SUMMED):
        return values[0]
    if op.outputs[0].dtype.is_integer and op.inputs[0].dtype.is_integer:
        return values[0]
    return elementwise_rule(op, values)


def _select(op: Any, values: Values) -> Dependence:
    if not values[0].is_plain:
        return elementwise_rule(op, values)
    selected = dependence.added(list(op.inputs)[1:], values[1:], op.outputs[0])
    if selected.kind is Kind.ROWS:  # the condition must not have a place for each row
        selected = with_power(dependence.aligned(op.inputs, values, op.outputs[0]), selected.power)
    return selected if selected.kind is not Kind.FREE else size(None, selected.power)


def constant(op: Any, values: Values) -> Dependence:
    """Returns the class of a constant, with its value if it is zero or an integer."""
    del values
    value = tf.get_static_value(op.outputs[0])
    if value is None or not np.issubdtype(np.asarray(value).dtype, np.number):
        return FREE
    if not np.any(value):
        return ZERO
    is_size = np.ndim(value) == 0 and np.issubdtype(np.asarray(value).dtype, np.integer)
    return size(int(value)) if is_size else FREE


def _filled_alike(value: Dependence, constant: Dependence) -> Dependence:
    if value.kind is Kind.ROWS:
        return replace(value, power=0)
    return constant if value.kind in (Kind.FREE, Kind.SUMMED) else worst([value]) or UNKNOWN


def _rules() -> dict[str, Rule]:
    rules: dict[str, Rule] = dict.fromkeys(_ELEMENTWISE.split(), elementwise_rule)
    rules |= dict.fromkeys(_LINEAR.split(), lambda op, v: v[0])
    rules |= dict.fromkeys(["Add", "AddV2", "AddN", "Sub"], _added)
    rules |= dict.fromkeys(["Maximum", "Minimum"], _extreme)
    rules |= dict.fromkeys(
        ["Mul", "MulNoNan"], lambda op, v: dependence.multiplied(op.inputs, v, op.outputs[0])
    )
    rules |= dict.fromkeys(
        ["RealDiv", "Div", "DivNoNan"],
        lambda op, v: dependence.divided(op.inputs, v, op.outputs[0]),
    )
    rules |= dict.fromkeys(["Select", "SelectV2"], _select)
    rules |= dict.fromkeys(["Rank", "VarHandleOp", "NoOp"], lambda op, v: FREE)
    return rules | {
        "Bitcast": lambda op, v: (
            elementwise_rule(op, v)
            if op.inputs[0].dtype.size == op.outputs[0].dtype.size
            else worst(v) or UNKNOWN
        ),
        "Cast": _cast,
        "Neg": lambda op, v: without_factor(v[0]),
        "Const": constant,
        "ZerosLike": lambda op, v: _filled_alike(v[0], ZERO),
        "OnesLike": lambda op, v: _filled_alike(v[0], FREE),
        # Values for keys, from a table with a default.
        "LookupTableFindV2": given_plain(
            lambda op, v: dependence.elementwise([op.inputs[1]], [v[1]], op.outputs[0]), 0, 2
        ),
    }


#: The rules, by type of operation.
RULES = _rules()
