"""Rules of operations on single elements of tensors, and of constants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.rows import dependence as row_dependence
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
    return row_dependence.elementwise(op.inputs, values, op.outputs[0])


def _added(op: Any, values: Values) -> Dependence:
    found = row_dependence.added(op.inputs, values, op.outputs[0])
    return without_factor(found) if op.type == "Sub" else found


def _extreme(op: Any, values: Values) -> Dependence:
    """`Maximum` and `Minimum`, also of two equal sizes."""
    is_size = values[0].kind is Kind.FREE and values[0].factor is not None
    return values[0] if is_size and values[0] == values[1] else elementwise_rule(op, values)


def _negated(op: Any, values: Values) -> Dependence:
    del op
    return without_factor(values[0])


def _multiplied(op: Any, values: Values) -> Dependence:
    return row_dependence.multiplied(op.inputs, values, op.outputs[0])


def _divided(op: Any, values: Values) -> Dependence:
    return row_dependence.divided(op.inputs, values, op.outputs[0])


def _same(op: Any, values: Values) -> Dependence:
    del op
    return values[0]


def _cast(op: Any, values: Values) -> Dependence:
    to_float = op.outputs[0].dtype.is_floating or op.outputs[0].dtype.is_complex
    from_sum = values[0].kind is Kind.SUMMED and not op.inputs[0].dtype.is_bool
    if to_float and (from_sum or values[0].kind is not Kind.SUMMED):
        return values[0]
    if op.outputs[0].dtype.is_integer and op.inputs[0].dtype.is_integer:
        return values[0]
    return elementwise_rule(op, values)


def _bitcast(op: Any, values: Values) -> Dependence:
    is_alike = op.inputs[0].dtype.size == op.outputs[0].dtype.size
    return elementwise_rule(op, values) if is_alike else worst(values) or UNKNOWN


def _select(op: Any, values: Values) -> Dependence:
    if not values[0].is_plain:
        return elementwise_rule(op, values)
    found = row_dependence.added(list(op.inputs)[1:], values[1:], op.outputs[0])
    if found.kind is Kind.ROWS:  # the condition must not have a place for each row
        found = with_power(row_dependence.aligned(op.inputs, values, op.outputs[0]), found.power)
    return found if found.kind is not Kind.FREE else size(None, found.power)


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


def _zeros(op: Any, values: Values) -> Dependence:
    return _filled_alike(values[0], ZERO)


def _ones(op: Any, values: Values) -> Dependence:
    return _filled_alike(values[0], FREE)


def _filled_alike(value: Dependence, constant: Dependence) -> Dependence:
    """Returns the class of a constant with the shape of another tensor."""
    if value.kind is Kind.ROWS:
        return replace(value, power=0)
    return constant if value.kind in (Kind.FREE, Kind.SUMMED) else worst([value]) or UNKNOWN


def _free(op: Any, values: Values) -> Dependence:
    del op, values
    return FREE


def _found(op: Any, values: Values) -> Dependence:
    """`LookupTableFindV2`: values for the keys, from a table with a default."""
    return row_dependence.elementwise([op.inputs[1]], [values[1]], op.outputs[0])


def _rules() -> dict[str, Rule]:
    found: dict[str, Rule] = dict.fromkeys(_ELEMENTWISE.split(), elementwise_rule)
    found |= dict.fromkeys(_LINEAR.split(), _same)
    found |= dict.fromkeys(["Add", "AddV2", "AddN", "Sub"], _added)
    found |= dict.fromkeys(["Maximum", "Minimum"], _extreme)
    found |= dict.fromkeys(["Mul", "MulNoNan"], _multiplied)
    found |= dict.fromkeys(["RealDiv", "Div", "DivNoNan"], _divided)
    found |= dict.fromkeys(["Select", "SelectV2"], _select)
    found |= dict.fromkeys(["Rank", "VarHandleOp", "NoOp"], _free)
    return found | {
        "Bitcast": _bitcast, "Cast": _cast, "Neg": _negated, "Const": constant, "ZerosLike": _zeros,
        "OnesLike": _ones, "LookupTableFindV2": given_plain(_found, 0, 2),
    }  # fmt: skip


#: The rules, by type of operation.
RULES = _rules()
