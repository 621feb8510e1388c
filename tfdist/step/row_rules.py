"""How TensorFlow's operations pass on the dependence on rows: a rule for each type of operation.

A rule gets an operation and the classes of its inputs (`row_dependence.Dependence`), and returns
the class of its outputs. Operations without a rule are UNKNOWN as soon as rows reach them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.step import row_dependence
from tfdist.step.row_dependence import (
    FREE,
    MIXED,
    UNKNOWN,
    ZERO,
    Dependence,
    Kind,
    rows,
    size,
    summed,
    with_power,
    worst,
)

Values = Sequence[Dependence]
Rule = Callable[[Any, Values], Dependence]

#: Functions of single elements of their inputs.
_ELEMENTWISE = """
Abs Acos Acosh AsString Asin Asinh Atan Atan2 Atanh Betainc BitwiseAnd BitwiseOr BitwiseXor Ceil
CheckNumerics ClipByValue Complex ComplexAbs Cos Cosh Digamma Elu Equal Erf Erfc Erfinv Exp Expm1
Floor FloorDiv FloorMod Greater GreaterEqual Igamma Igammac Imag Inv Invert IsFinite IsInf IsNan
LeakyRelu LeftShift Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum
Mod Ndtri NotEqual Polygamma Pow Reciprocal Relu Relu6 RightShift Rint Round Rsqrt Selu Sigmoid Sign
Sin Sinh Softplus Softsign Sqrt Square SquaredDifference StringLower StringToHashBucketFast
StringToHashBucketStrong StringToNumber StringUpper Tan Tanh TruncateDiv TruncateMod Xdivy Xlog1py
Xlogy Zeta
"""

#: Linear functions of single elements, and tensors as they are.
_LINEAR = "Conj Identity PreventGradient Real Snapshot StopGradient PlaceholderWithDefault"

#: Operations whose first input and output have one entry per row along the first axis, and whose
#: other inputs are weights; by the place of the input with rows.
_LEADING = {
    0: """
    AvgPool AvgPool3D BiasAdd Conv Conv1D Conv2D Conv3D DepthwiseConv2dNative Dilation2D
    ExtractImagePatches LRN MaxPool MaxPool3D MaxPoolV2 ResizeArea ResizeBicubic ResizeBilinear
    ResizeNearestNeighbor SpaceToDepth DepthToSpace AdjustContrastv2 AdjustHue AdjustSaturation
    ImageProjectiveTransformV3 ImageProjectiveTransformV2 HSVToRGB RGBToHSV
    """,
    2: "Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput",
}

#: Functions of the last axes of a tensor, by the number of these axes.
_LAST_AXES = {
    "Softmax": 1, "LogSoftmax": 1, "TopKV2": 1, "TopK": 1, "Cholesky": 2,
    "MatrixBandPart": 2, "MatrixInverse": 2, "MatrixDeterminant": 2, "MatrixDiagPartV3": 2,
    "Svd": 2, "Qr": 2, "SelfAdjointEigV2": 2, "FFT": 1, "IFFT": 1, "RFFT": 1, "IRFFT": 1,
    "FFT2D": 2, "IFFT2D": 2, "RFFT2D": 2, "IRFFT2D": 2,
}  # fmt: skip

#: Draws of random numbers, whose first input is their shape.
_DRAWS = """
RandomStandardNormal RandomUniform RandomUniformInt StatelessRandomNormalV2
StatelessRandomUniformFullIntV2 StatelessRandomUniformIntV2 StatelessRandomUniformV2
StatelessTruncatedNormalV2 TruncatedNormal
"""


def _elementwise(op: Any, values: Values) -> Dependence:
    return row_dependence.elementwise(op.inputs, values, op.outputs[0])


def _added(op: Any, values: Values) -> Dependence:
    found = row_dependence.added(op.inputs, values, op.outputs[0])
    return _without_factor(found) if op.type == "Sub" else found


def _without_factor(value: Dependence) -> Dependence:
    """Returns a class without the integer that a FREE value is known to be, unless that is 0."""
    return value if value.is_zero or value.kind is not Kind.FREE else size(None, value.power)


def _negated(op: Any, values: Values) -> Dependence:
    del op
    return _without_factor(values[0])


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
    return _elementwise(op, values)


def _select(op: Any, values: Values) -> Dependence:
    if not values[0].is_plain:
        return _elementwise(op, values)
    found = row_dependence.added(list(op.inputs)[1:], values[1:], op.outputs[0])
    if found.kind is Kind.ROWS:  # the condition must not have a place for each row
        found = with_power(row_dependence.aligned(op.inputs, values, op.outputs[0]), found.power)
    return found if found.kind is not Kind.FREE else size(None, found.power)


def _constant(op: Any, values: Values) -> Dependence:
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


def _axes_of(op: Any, place: int = 1) -> list[int] | None:
    """Returns the axes that an input holds, counted from the front; None if they are unknown."""
    axes, rank = tf.get_static_value(op.inputs[place]), op.inputs[0].shape.rank
    if axes is None or rank is None:
        return None
    return [int(axis) % rank if rank else 0 for axis in np.ravel(axes)]


def _reduced(op: Any, values: Values, is_linear: bool) -> Dependence:
    """Reductions: `Sum` and `Mean` are linear, others are not."""
    value = values[0]
    if value.kind is Kind.SHAPE:
        return _product_of(value) if op.type == "Prod" else UNKNOWN
    if value.kind in (Kind.FREE, Kind.SUMMED):
        if value.kind is Kind.FREE and not value.power:
            return value if value.is_zero else FREE
        return _without_factor(value) if is_linear else MIXED
    axes = _axes_of(op)
    if value.kind is Kind.SELECTED and axes is not None:
        if 0 not in axes:
            return value
        return summed(0) if op.type == "Sum" else MIXED
    if value.kind is not Kind.ROWS or axes is None:
        return value if value.kind is Kind.MIXED else UNKNOWN
    if not is_linear and value.power:
        return MIXED
    if value.axis not in axes:
        is_kept = op.get_attr("keep_dims") if "keep_dims" in op.node_def.attr else False
        before = 0 if is_kept else sum(axis < value.axis for axis in set(axes))
        return replace(value, axis=value.axis - before)
    if not is_linear:
        return MIXED
    return summed(value.power - (op.type in ("Mean", "EuclideanNorm")))


def _product_of(shape: Dependence) -> Dependence:
    factors = [part.factor for part in shape.parts]
    power = sum(part.power for part in shape.parts)
    known = [factor for factor in factors if factor is not None]
    return size(math.prod(known) if len(known) == len(factors) else None, power)


def _one_axis(op: Any, values: Values) -> Dependence:
    """`ArgMax` and `ArgMin`: one axis is left out."""
    value = values[0]
    if value.kind is not Kind.ROWS or value.power:
        return _elementwise(op, values[:1]) if value.kind is not Kind.ROWS else MIXED
    if (axes := _axes_of(op)) is None:
        return UNKNOWN
    if value.axis in axes:
        return MIXED
    return replace(value, axis=value.axis - (axes[0] < value.axis))


def _cumulative(op: Any, values: Values) -> Dependence:
    """`Cumsum`, `Reverse`, `Roll`: the entries along an axis are combined or moved."""
    value = values[0]
    place = 2 if op.type == "Roll" else 1
    if value.kind is not Kind.ROWS:
        return _elementwise(op, values)
    if (axes := _axes_of(op, place)) is None or not all(v.is_plain for v in values[1:]):
        return UNKNOWN
    return MIXED if value.axis in axes or value.power else value


def _last_axes(op: Any, values: Values) -> Dependence:
    value, rank = values[0], op.inputs[0].shape.rank
    if not all(v.is_plain for v in values[1:]):
        return worst(values) or UNKNOWN
    if value.kind is not Kind.ROWS:
        return row_dependence.elementwise(op.inputs[:1], values[:1], op.outputs[0])
    if rank is None:
        return UNKNOWN
    return MIXED if value.power or value.axis >= rank - _LAST_AXES[op.type] else value


def _leading(op: Any, values: Values, place: int) -> Dependence:
    others = [v for i, v in enumerate(values) if i != place]
    if values[place].kind is Kind.ROWS and values[place].is_row_wise:
        kinds = (v.is_plain or (v.kind is Kind.SHAPE and place == 2) for v in others)
        return values[place] if all(kinds) else worst(others) or UNKNOWN
    if all(v.is_plain or v.kind is Kind.SHAPE for v in values):
        return FREE
    return worst(values) or UNKNOWN


def _cross_entropy(op: Any, values: Values) -> Dependence:
    """Softmax cross-entropies of logits [rows, classes] and labels."""
    if all(v.is_plain for v in values):
        return FREE
    if worst(values) is None and all(v.is_row_wise for v in values):
        factors = {v.factor for v in values if v.kind is Kind.ROWS} - {None}
        return rows(0, factors.pop() if len(factors) == 1 else None)
    return worst(values) or MIXED


def _shape(op: Any, values: Values) -> Dependence:
    value, shape = values[0], op.inputs[0].shape
    if value.kind in (Kind.FREE, Kind.SUMMED) or shape.is_fully_defined():
        return FREE
    if value.kind is not Kind.ROWS or shape.rank is None:
        return worst([value]) or UNKNOWN
    parts = [size(length) for length in shape]
    parts[value.axis] = size(value.factor, 1)
    return Dependence(Kind.SHAPE, parts=tuple(parts))


def _num_elements(op: Any, values: Values) -> Dependence:
    shape = _shape(op, values)
    if shape.kind is Kind.SHAPE:
        return _product_of(shape)
    return size(op.inputs[0].shape.num_elements()) if shape.is_plain else shape


def parts_of(tensor: Any, value: Dependence) -> tuple[Dependence, ...] | None:
    """Returns the classes of the entries of a vector of sizes; None if they are not known."""
    if value.kind is Kind.SHAPE:
        return value.parts
    constant = tf.get_static_value(tensor)
    if constant is not None:
        return tuple(size(int(length)) for length in np.ravel(constant))
    if value.kind is not Kind.FREE:
        return None
    length = tensor.shape[0] if tensor.shape.rank == 1 else 1 if tensor.shape.rank == 0 else None
    if length is None or (value.power and length != 1):
        return None
    return (value,) * length


def _packed(op: Any, values: Values) -> Dependence:
    axis, rank = op.get_attr("axis"), op.outputs[0].shape.rank
    is_free = all(v.kind is Kind.FREE for v in values)
    if is_free and rank == 1 and any(v.power for v in values):
        return Dependence(Kind.SHAPE, parts=tuple(values))
    found = row_dependence.added(op.inputs, values, op.inputs[0])
    if rank is None or found.kind is not Kind.ROWS:
        return _without_factor(found)
    return replace(found, axis=found.axis + (axis % rank <= found.axis))


def _unpacked(op: Any, values: Values) -> Dependence:
    value, rank = values[0], op.inputs[0].shape.rank
    if value.kind is Kind.SHAPE:
        return UNKNOWN
    if value.kind is not Kind.ROWS or rank is None:
        return value if value.kind is not Kind.ROWS else UNKNOWN
    axis = op.get_attr("axis") % rank
    return UNKNOWN if axis == value.axis else replace(value, axis=value.axis - (axis < value.axis))


def _concatenated(op: Any, values: Values) -> Dependence:
    tensors, classes = list(op.inputs)[:-1], values[:-1]
    axis, rank = tf.get_static_value(op.inputs[-1]), op.outputs[0].shape.rank
    is_free = all(value.kind in (Kind.FREE, Kind.SHAPE) for value in classes)
    if is_free and rank == 1 and any(v.power or v.kind is Kind.SHAPE for v in classes):
        parts = [parts_of(t, v) for t, v in zip(tensors, classes, strict=True)]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return UNKNOWN
        return Dependence(Kind.SHAPE, parts=tuple(v for part in known for v in part))
    found = row_dependence.added(tensors, classes, op.outputs[0])
    if found.kind is Kind.ROWS and (axis is None or rank is None or axis % rank == found.axis):
        return UNKNOWN
    return _without_factor(found)


def _split(op: Any, values: Values) -> Dependence:
    place = 1 if op.type == "Split" else 0
    value, rank = values[place], op.inputs[place].shape.rank
    axis = tf.get_static_value(op.inputs[0 if op.type == "Split" else 2])
    if value.kind is not Kind.ROWS:
        return UNKNOWN if value.kind is Kind.SHAPE else value
    if axis is None or rank is None:
        return UNKNOWN
    return MIXED if int(axis) % rank == value.axis else value


def _expanded(op: Any, values: Values) -> Dependence:
    value, axis = values[0], tf.get_static_value(op.inputs[1])
    rank = op.outputs[0].shape.rank
    if value.kind is not Kind.ROWS:
        return UNKNOWN if value.kind is Kind.SHAPE else value
    if axis is None or rank is None:
        return UNKNOWN
    return replace(value, axis=value.axis + (int(np.ravel(axis)[0]) % rank <= value.axis))


def _squeezed(op: Any, values: Values) -> Dependence:
    value, rank = values[0], op.inputs[0].shape.rank
    if value.kind is not Kind.ROWS:
        return UNKNOWN if value.kind is Kind.SHAPE and op.outputs[0].shape.rank else value
    axes = op.get_attr("squeeze_dims")
    if rank is None or not axes:
        return UNKNOWN
    axes = {axis % rank for axis in axes}
    return (
        UNKNOWN
        if value.axis in axes
        else replace(value, axis=value.axis - sum(axis < value.axis for axis in axes))
    )


def _transposed(op: Any, values: Values) -> Dependence:
    value, order = values[0], tf.get_static_value(op.inputs[1])
    if value.kind is not Kind.ROWS:
        return UNKNOWN if value.kind in (Kind.SHAPE, Kind.SELECTED) else value
    return UNKNOWN if order is None else replace(value, axis=list(order).index(value.axis))


def _reshaped(op: Any, values: Values) -> Dependence:
    value, inputs, out = values[0], op.inputs[0], op.outputs[0]
    if value.kind is Kind.SHAPE:
        is_vector = out.shape.rank == 1
        return value if is_vector else value.parts[0] if len(value.parts) == 1 else UNKNOWN
    parts = parts_of(op.inputs[1], values[1])
    if value.kind is Kind.SELECTED:
        return value if parts and parts[0].factor == -1 else UNKNOWN
    if value.kind is not Kind.ROWS:
        if parts is not None and any(part.power for part in parts):
            return UNKNOWN
        return value
    if value.axis or not parts:
        return UNKNOWN  # the entries of a row are not beside each other
    if parts[0].power == 1 and not any(part.power for part in parts[1:]):
        return rows(0, parts[0].factor or _block(inputs, out, value), value.power)
    if parts[0].power or parts[0].factor != -1:
        return UNKNOWN
    if any(part.power for part in parts[1:]):
        return UNKNOWN
    block = _block(inputs, out, value)
    if block is None and (inputs.shape[1:] == out.shape[1:]) and out.shape[1:].is_fully_defined():
        block = value.factor
    if block is None and not _suffix_divides(inputs, out):
        return UNKNOWN
    return rows(0, block, value.power)


def _block(inputs: Any, out: Any, value: Dependence) -> int | None:
    """Returns how many leading entries of a reshaped tensor a row has, if that is known."""
    if value.factor is None or not inputs.shape[1:].is_fully_defined():
        return None
    if not out.shape[1:].is_fully_defined():
        return None
    per_row, per_entry = (math.prod(t.shape[1:]) for t in (inputs, out))
    per_row *= value.factor
    return per_row // per_entry if per_entry and per_row % per_entry == 0 else None


def _suffix_divides(inputs: Any, out: Any) -> bool:
    """Tells whether the last axes of a tensor, which are known, make up an entry of another."""
    if not out.shape[1:].is_fully_defined():
        return False
    wanted, found = math.prod(out.shape[1:]), 1
    for length in reversed(inputs.shape[1:].as_list()):
        if length is None:
            break
        found *= length
    return bool(wanted) and found % wanted == 0


def _filled(op: Any, values: Values) -> Dependence:
    """`Fill` and `BroadcastTo` with a shape that holds the number of rows."""
    is_fill = op.type == "Fill"
    shape, value = (values[0], values[1]) if is_fill else (values[1], values[0])
    parts = parts_of(op.inputs[0 if is_fill else 1], shape)
    return _spread(op.inputs[1 if is_fill else 0], value, parts, op.outputs[0])


def _spread(
    tensor: Any, value: Dependence, parts: Sequence[Dependence] | None, out: Any
) -> Dependence:
    if (bad := worst([value])) is not None:
        return bad
    if parts is None:
        return UNKNOWN
    axes = [axis for axis, part in enumerate(parts) if part.power]
    if value.kind is Kind.ROWS:
        if tensor.shape.rank is None or out.shape.rank is None:
            return UNKNOWN
        axis = value.axis + out.shape.rank - tensor.shape.rank
        is_kept = axes in ([], [axis]) and (parts[axis].power == 1 or parts[axis].factor in (1, -1))
        return replace(value, axis=axis) if is_kept else UNKNOWN
    if not axes:
        return value
    if value.kind is not Kind.FREE or len(axes) > 1 or parts[axes[0]].power != 1:
        return MIXED if value.kind is Kind.SUMMED else UNKNOWN
    if tensor.shape.rank is None:
        return UNKNOWN
    place = axes[0] - len(parts)
    if -place <= tensor.shape.rank and tensor.shape[place] != 1:
        return UNKNOWN
    return rows(axes[0], parts[axes[0]].factor, value.power)


def _tiled(op: Any, values: Values) -> Dependence:
    value, parts = values[0], parts_of(op.inputs[1], values[1])
    if value.kind is Kind.ROWS and parts is not None and parts[value.axis] == size(1):
        return value if not any(part.power for part in parts) else MIXED
    return (
        UNKNOWN if value.kind is Kind.ROWS else _spread(op.inputs[0], value, parts, op.outputs[0])
    )


def _range(op: Any, values: Values) -> Dependence:
    return FREE if all(v.is_plain for v in values) else worst(values) or UNKNOWN


def _sliced(op: Any, values: Values) -> Dependence:
    """`Slice`."""
    value, begins, lengths = values[0], *(tf.get_static_value(t) for t in list(op.inputs)[1:])
    if value.kind is Kind.SHAPE:
        if begins is None or lengths is None:
            return UNKNOWN
        begin, length = int(begins[0]), int(lengths[0])
        end = len(value.parts) if length < 0 else begin + length
        return replace(value, parts=value.parts[begin:end])
    if value.kind is not Kind.ROWS:
        return value if all(v.is_plain or v.kind is Kind.SHAPE for v in values[1:]) else UNKNOWN
    first = parts_of(op.inputs[1], values[1])
    number = parts_of(op.inputs[2], values[2])
    if first is None or number is None or not first[value.axis].is_zero:
        return MIXED if first is not None and first[value.axis].factor else UNKNOWN
    whole = (size(-1), size(value.factor, 1))
    is_whole = number[value.axis] in whole and number[value.axis].factor is not None
    return value if is_whole else UNKNOWN


def _strided(op: Any, values: Values) -> Dependence:
    """`StridedSlice`."""
    value = values[0]
    if value.kind in (Kind.MIXED, Kind.UNKNOWN, Kind.LIST):
        return worst(values) or UNKNOWN
    if value.kind is Kind.SUMMED:
        return value
    if value.kind is Kind.FREE:
        is_fixed = all(v.is_plain or v.kind is Kind.SHAPE for v in values[1:])
        if not is_fixed:
            return UNKNOWN
        return value if value.power or value.is_zero else _constant(op, [])
    bounds = [tf.get_static_value(t, partial=True) for t in list(op.inputs)[1:]]
    masks = [
        op.get_attr(f"{name}_mask")
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    ]
    if any(bound is None for bound in bounds[:1] + bounds[2:]):
        return UNKNOWN
    if value.kind is Kind.SHAPE:
        return _entries(value, bounds, masks)
    rank, taken, made = op.inputs[0].shape.rank, 0, 0
    if rank is None:
        return UNKNOWN
    count, new_axes = len(bounds[0]), bin(masks[3]).count("1")
    for place in range(count):
        bit = 1 << place
        if masks[2] & bit:
            skipped = rank - (count - 1 - new_axes)
            if taken <= value.axis < taken + skipped:
                return replace(value, axis=made + value.axis - taken)
            taken, made = taken + skipped, made + skipped
            continue
        if masks[3] & bit:
            made += 1
            continue
        if taken == value.axis:
            from_start = masks[0] & bit or bounds[0][place] == 0
            is_whole = from_start and masks[1] & bit and bounds[2][place] == 1
            if is_whole and not masks[4] & bit:
                return replace(value, axis=made)
            return UNKNOWN if bounds[1] is None and not masks[4] & bit else MIXED
        taken, made = taken + 1, made + (not masks[4] & bit)
    return replace(value, axis=made + value.axis - taken)


def _entries(value: Dependence, bounds: list[Any], masks: list[int]) -> Dependence:
    """Returns the class of entries of a vector of sizes."""
    if len(bounds[0]) != 1 or masks[2] or masks[3]:
        return UNKNOWN
    if any(bound is not None and bound[0] is None for bound in bounds):
        return UNKNOWN
    begin = None if masks[0] & 1 else int(bounds[0][0])
    if masks[4] & 1:
        place = begin or 0
        return value.parts[place] if -len(value.parts) <= place < len(value.parts) else UNKNOWN
    if bounds[1] is None and not masks[1] & 1:
        return UNKNOWN
    end = None if masks[1] & 1 else int(bounds[1][0])
    return replace(value, parts=value.parts[begin : end : int(bounds[2][0])])


def _padded(op: Any, values: Values) -> Dependence:
    value, widths = values[0], tf.get_static_value(op.inputs[1])
    if value.kind is not Kind.ROWS:
        return UNKNOWN if value.kind is Kind.SHAPE else value
    if widths is None or not all(v.is_plain for v in values[1:]) or value.power:
        return UNKNOWN
    return MIXED if np.any(widths[value.axis]) else value


def _gathered(op: Any, values: Values) -> Dependence:
    """`GatherV2`, `Gather` and `ResourceGather`: entries of a table, or entries of each row."""
    table, indices = values[0], values[1]
    if table.kind is Kind.SHAPE:
        places = tf.get_static_value(op.inputs[1])
        if places is None:
            return UNKNOWN
        parts = tuple(table.parts[int(place)] for place in np.ravel(places))
        return parts[0] if np.ndim(places) == 0 else replace(table, parts=parts)
    if indices.kind is Kind.SELECTED and table.kind is Kind.ROWS and table.is_row_wise:
        is_first = op.type == "GatherV2" and not tf.get_static_value(op.inputs[2])
        return indices if is_first and not op.get_attr("batch_dims") else UNKNOWN
    if (bad := worst(values[:2])) is not None:
        return bad
    axis = tf.get_static_value(op.inputs[2]) if op.type == "GatherV2" else 0
    batch_dims = op.get_attr("batch_dims") if "batch_dims" in op.node_def.attr else 0
    table_rank = None if op.type == "ResourceGather" else op.inputs[0].shape.rank
    if axis is None or (table_rank is None and axis < 0):
        return UNKNOWN
    axis = int(axis) % table_rank if table_rank else int(axis)
    if table.is_plain and indices.is_plain:
        return FREE
    if table.kind is Kind.SUMMED or indices.kind is Kind.SUMMED:
        return table if indices.is_plain and table.kind is Kind.SUMMED else MIXED
    if table.kind is Kind.FREE and indices.kind is Kind.ROWS and not (table.power or indices.power):
        if batch_dims:
            return UNKNOWN
        return replace(indices, axis=axis + indices.axis)
    if table.kind is not Kind.ROWS:
        return UNKNOWN
    if batch_dims:
        is_by_row = indices.kind is Kind.ROWS and table.axis == indices.axis < batch_dims
        is_alike = (
            is_by_row and table.factor == indices.factor and not (table.power or indices.power)
        )
        return table if is_alike else UNKNOWN
    if indices.kind is Kind.ROWS:
        return MIXED if table.axis == axis else UNKNOWN
    rank = op.inputs[1].shape.rank
    if table.axis == axis or rank is None:
        return MIXED if table.axis == axis else UNKNOWN
    return replace(table, axis=table.axis + (rank - 1 if table.axis > axis else 0))


def _where(op: Any, values: Values) -> Dependence:
    """`Where`: the places of rows that are selected by their own numbers."""
    value, mask = values[0], op.inputs[0]
    if value.is_plain:
        return FREE
    if value.kind is not Kind.ROWS or not value.is_row_wise or mask.shape.rank != 1:
        return worst(values) or UNKNOWN
    while mask.op.type in ("Reshape", "Identity"):
        mask = mask.op.inputs[0]
    return Dependence(Kind.SELECTED, factor=hash(mask.name))


def _one_hot(op: Any, values: Values) -> Dependence:
    value, rank = values[0], op.inputs[0].shape.rank
    if not all(v.is_plain for v in values[1:]) or (value.kind is Kind.ROWS and value.power):
        return worst(values) or UNKNOWN
    if value.kind is not Kind.ROWS:
        return row_dependence.elementwise(op.inputs[:1], values[:1], op.outputs[0])
    if rank is None:
        return UNKNOWN
    return replace(value, axis=value.axis + (op.get_attr("axis") % (rank + 1) <= value.axis))


def _half_of_squares(op: Any, values: Values) -> Dependence:
    if values[0].kind is Kind.ROWS:
        return MIXED if values[0].power else summed(0)
    return _elementwise(op, values)


def _product(op: Any, values: Values) -> Dependence:
    """`MatMul` and `BatchMatMulV2`, as sums over labeled axes."""
    ranks = [t.shape.rank for t in list(op.inputs)[:2]]
    if None in ranks:
        return _einsum_of(op, values, None, "")
    turned = [
        any(n in op.node_def.attr and op.get_attr(n) for n in names)
        for names in (("transpose_a", "adj_x"), ("transpose_b", "adj_y"))
    ]
    ends = ["km" if turned[0] else "mk", "nk" if turned[1] else "kn"]
    rank = max(ranks)
    letters = "abcdefgh"[: rank - 2]
    # Axes of length 1 are broadcast: they get labels of their own.
    labels = []
    for tensor, own, end in zip(list(op.inputs)[:2], ranks, ends, strict=True):
        lengths = tensor.shape[: own - 2]
        front = letters[len(letters) - (own - 2) :]
        labels.append(
            [("1" if n == 1 else c) for c, n in zip(front, lengths, strict=True)] + [*end]
        )
    return _einsum_of(op, values, labels, letters + "mn")


def _einsum(op: Any, values: Values) -> Dependence:
    given, out = op.get_attr("equation").decode().replace(" ", "").split("->")
    if "." in given:
        return _einsum_of(op, values, None, "")
    return _einsum_of(op, values, [list(part) for part in given.split(",")], out)


def _einsum_of(op: Any, values: Values, labels: list[list[str]] | None, out: str) -> Dependence:
    """Returns the class of a sum of products.

    Args:
        op: The operation.
        values: The classes of its factors.
        labels: Those of the axes of each factor; None if they are not known.
        out: The labels of the axes of the result.
    """
    if (bad := worst(values)) is not None:
        return bad
    if all(value.is_plain for value in values):
        return FREE
    power = sum(value.power for value in values)
    kinds = [value.kind for value in values]
    if Kind.SUMMED in kinds:
        return summed(power) if kinds.count(Kind.FREE) == len(kinds) - 1 else MIXED
    if Kind.ROWS not in kinds or labels is None:
        return UNKNOWN
    pairs = list(zip(values, labels, strict=True))
    of_rows = [(v, own[v.axis]) for v, own in pairs if v.kind is Kind.ROWS]
    found = {label for _, label in of_rows}
    if len(found) > 1:
        return MIXED
    label = found.pop()
    if label == "1":
        return UNKNOWN
    if any(label in own for v, own in pairs if v.kind is not Kind.ROWS):
        return MIXED  # a weight for each place in the batch
    factors = {v.factor for v, _ in of_rows}
    if len(factors - {None}) > 1:
        return UNKNOWN
    if label not in out:
        return summed(power)
    known = factors - {None}
    return rows(out.index(label), known.pop() if known else None, power)


def _drawn(op: Any, values: Values) -> Dependence:
    """Random numbers: every replica draws its rows of the global draw, or the same numbers."""
    parts = parts_of(op.inputs[0], values[0])
    if parts is None or not all(v.is_plain for v in values[1:]):
        return worst(values) or UNKNOWN
    if not any(part.power for part in parts):
        return FREE
    is_led = parts[0].power == 1 and not any(part.power for part in parts[1:])
    return rows(0, parts[0].factor) if is_led else UNKNOWN


def _found(op: Any, values: Values) -> Dependence:
    """`LookupTableFindV2`."""
    if not (values[0].is_plain and values[2].is_plain):
        return worst(values) or UNKNOWN
    return row_dependence.elementwise([op.inputs[1]], [values[1]], op.outputs[0])


def _list_reserved(op: Any, values: Values) -> Dependence:
    del op, values
    return Dependence(Kind.LIST)


def _list_set(op: Any, values: Values) -> Dependence:
    listed, item = values[0], values[2]
    if listed.kind is not Kind.LIST or not values[1].is_plain:
        return worst(values[1:]) or UNKNOWN
    return row_dependence.joined(listed, Dependence(Kind.LIST, parts=(item,)))


def _list_get(op: Any, values: Values) -> Dependence:
    listed = values[0]
    if listed.kind is not Kind.LIST or not listed.parts or not values[1].is_plain:
        return UNKNOWN if listed.kind is Kind.LIST else listed
    return listed.parts[0]


def _list_stacked(op: Any, values: Values) -> Dependence:
    listed = values[0]
    if listed.kind is not Kind.LIST or not listed.parts:
        return UNKNOWN if listed.kind is Kind.LIST else listed
    item = listed.parts[0]
    if item.kind is Kind.ROWS:
        return replace(item, axis=item.axis + 1)
    return item if item.kind is not Kind.FREE else size(0 if item.is_zero else None, item.power)


def _list_of(op: Any, values: Values) -> Dependence:
    """`TensorListFromTensor`."""
    value = values[0]
    if value.kind is Kind.ROWS:
        if value.axis == 0:
            return UNKNOWN
        value = replace(value, axis=value.axis - 1)
    return Dependence(Kind.LIST, parts=(value,)) if worst([value]) is None else value


def _free(op: Any, values: Values) -> Dependence:
    del op, values
    return FREE


def _rules() -> dict[str, Rule]:
    found: dict[str, Rule] = dict.fromkeys(_ELEMENTWISE.split(), _elementwise)
    found |= dict.fromkeys(_LINEAR.split(), _same)
    found |= dict.fromkeys(["Add", "AddV2", "AddN", "Sub"], _added)
    found |= dict.fromkeys(["Mul", "MulNoNan"], _multiplied)
    found |= dict.fromkeys(["RealDiv", "Div", "DivNoNan"], _divided)
    found |= dict.fromkeys(["Sum", "Mean"], lambda op, v: _reduced(op, v, is_linear=True))
    names = ["Max", "Min", "Prod", "All", "Any", "EuclideanNorm"]
    found |= dict.fromkeys(names, lambda op, v: _reduced(op, v, is_linear=False))
    for place, text in _LEADING.items():
        rule = lambda op, v, place=place: _leading(op, v, place)  # noqa: E731
        found |= dict.fromkeys(text.split(), rule)
    found |= dict.fromkeys(_LAST_AXES, _last_axes) | dict.fromkeys(_DRAWS.split(), _drawn)
    found |= dict.fromkeys(["Cumsum", "Cumprod", "CumulativeLogsumexp"], _cumulative)
    found |= dict.fromkeys(["ReverseV2", "Roll"], _cumulative)
    found |= dict.fromkeys(["ArgMax", "ArgMin"], _one_axis)
    found |= dict.fromkeys(["Pad", "PadV2", "MirrorPad"], _padded)
    found |= dict.fromkeys(["MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"], _product)
    found |= dict.fromkeys(["GatherV2", "Gather", "ResourceGather"], _gathered)
    found |= dict.fromkeys(["Fill", "BroadcastTo"], _filled)
    found |= dict.fromkeys(["Split", "SplitV"], _split)
    found |= dict.fromkeys(["Select", "SelectV2"], _select)
    names = ["SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"]
    found |= dict.fromkeys(names, _cross_entropy)
    names = ["Rank", "VarHandleOp", "StatelessRandomGetKeyCounter", "StatelessRandomGetAlg", "NoOp"]
    found |= dict.fromkeys(names, _free)
    return found | {
        "Cast": _cast, "Neg": _negated, "Const": _constant, "ZerosLike": _zeros, "OnesLike": _ones,
        "Shape": _shape, "Size": _num_elements, "Pack": _packed, "Unpack": _unpacked,
        "ConcatV2": _concatenated, "ExpandDims": _expanded, "Squeeze": _squeezed,
        "Transpose": _transposed, "Reshape": _reshaped, "Tile": _tiled, "Range": _range,
        "Slice": _sliced, "StridedSlice": _strided, "OneHot": _one_hot, "L2Loss": _half_of_squares,
        "Einsum": _einsum, "Where": _where, "LookupTableFindV2": _found,
        "TensorListReserve": _list_reserved,
        "EmptyTensorList": _list_reserved, "TensorListSetItem": _list_set,
        "TensorListGetItem": _list_get, "TensorListStack": _list_stacked,
        "TensorListFromTensor": _list_of,
    }  # fmt: skip


#: The rules, by type of operation.
RULES: dict[str, Rule] = _rules()
