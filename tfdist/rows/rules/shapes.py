"""Rules of shapes, of operations that change the shape of a tensor, and of draws of a shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.rows import dependence
from tfdist.rows.dependence import (
    DRAWN,
    FREE,
    MIXED,
    UNKNOWN,
    Dependence,
    Kind,
    Rule,
    Values,
    given_plain,
    rows,
    size,
    without_factor,
    worst,
)
from tfdist.upstream.tensorflow_graphs import constant_value

#: Draws of random numbers, whose first input is their shape.
_DRAWS = """
RandomStandardNormal RandomUniform RandomUniformInt StatelessRandomGammaV3 StatelessRandomNormalV2
StatelessRandomUniformFullIntV2 StatelessRandomUniformIntV2 StatelessRandomUniformV2
StatelessTruncatedNormalV2 TruncatedNormal
"""


def parts_of(tensor: Any, value: Dependence) -> tuple[Dependence, ...] | None:
    """Returns the classes of the entries of a vector of sizes; None if they are not known."""
    if value.kind is Kind.SHAPE:
        return value.parts
    constant = constant_value(tensor)
    if constant is not None:
        return tuple(size(int(length)) for length in np.ravel(constant))
    if value.kind is not Kind.FREE:
        return None
    length = tensor.shape[0] if tensor.shape.rank == 1 else 1 if tensor.shape.rank == 0 else None
    if length is None or (value.power and length != 1):
        return None
    return (value,) * length


def product_of(shape: Dependence) -> Dependence:
    """Returns the class of the product of a vector of sizes: a number of elements."""
    factors = [part.factor for part in shape.parts]
    power = sum(part.power for part in shape.parts)
    known_factors = [factor for factor in factors if factor is not None]
    return size(math.prod(known_factors) if len(known_factors) == len(factors) else None, power)


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
        return product_of(shape)
    return size(op.inputs[0].shape.num_elements()) if shape.is_plain else shape


def _packed(op: Any, values: Values) -> Dependence:
    axis, rank = op.get_attr("axis"), op.outputs[0].shape.rank
    if values[0].kind is Kind.ROUND:  # the row of a round: its place, and zeros along other axes
        is_place = rank == 1 and all(value.is_zero for value in values[1:])
        return values[0] if is_place else worst(values) or UNKNOWN
    if rank == 1 and all(v.kind is Kind.FREE for v in values):
        # TensorFlow does not know a size that is taken from a shape with an unknown length.
        is_known = all(v.factor is not None for v in values)
        if any(v.power for v in values) or (is_known and constant_value(op.outputs[0]) is None):
            return Dependence(Kind.SHAPE, parts=tuple(values))
    total = dependence.added(op.inputs, values, op.inputs[0])
    if rank is None or total.kind is not Kind.ROWS:
        return without_factor(total)
    return replace(total, axis=total.axis + (axis % rank <= total.axis))


def _unpacked(op: Any, values: Values) -> Dependence | list[Dependence]:
    value, rank = values[0], op.inputs[0].shape.rank
    if value.kind is Kind.SHAPE:
        return list(value.parts)
    if value.kind is not Kind.ROWS or rank is None:
        return value if value.kind is not Kind.ROWS else UNKNOWN
    axis = op.get_attr("axis") % rank
    return UNKNOWN if axis == value.axis else replace(value, axis=value.axis - (axis < value.axis))


def _concatenated(op: Any, values: Values) -> Dependence:
    tensors, classes = list(op.inputs)[:-1], values[:-1]
    axis, rank = constant_value(op.inputs[-1]), op.outputs[0].shape.rank
    is_free = all(value.kind in (Kind.FREE, Kind.SHAPE) for value in classes)
    if is_free and rank == 1 and any(v.power or v.kind is Kind.SHAPE for v in classes):
        parts = [parts_of(t, v) for t, v in zip(tensors, classes, strict=True)]
        known_parts = [part for part in parts if part is not None]
        if len(known_parts) < len(parts):
            return UNKNOWN
        return Dependence(Kind.SHAPE, parts=tuple(v for part in known_parts for v in part))
    of_rows = {value.axis for value in classes if value.kind is Kind.ROWS}
    if axis is not None and rank is not None and of_rows == {int(axis) % rank}:
        if (bad := worst(classes)) is not None:
            return bad
        if not all(value.kind is Kind.ROWS for value in classes):
            return MIXED  # with a fixed number of other entries
        factors = [value.factor for value in classes if value.factor is not None]
        if (
            len(classes) == 1
            or len(factors) < len(classes)
            or any(value.power for value in classes)
        ):
            return classes[0] if len(classes) == 1 else UNKNOWN
        segments = list[Dependence]()
        for value in classes:
            segments += value.parts if value.parts not in ((), DRAWN) else [rows(0, value.factor)]
        return replace(classes[0], factor=sum(factors), parts=tuple(segments))
    total = dependence.added(tensors, classes, op.outputs[0])
    if total.kind is Kind.ROWS and (axis is None or rank is None):
        return UNKNOWN
    return without_factor(total)


def _split(op: Any, values: Values) -> Dependence | list[Dependence]:
    index = 1 if op.type == "Split" else 0
    value, rank = values[index], op.inputs[index].shape.rank
    axis = constant_value(op.inputs[0 if op.type == "Split" else 2])
    if value.kind is Kind.SHAPE and len(op.outputs) == len(value.parts) and op.type == "Split":
        return [replace(value, parts=(part,)) for part in value.parts]
    if value.kind is not Kind.ROWS:
        return UNKNOWN if value.kind is Kind.SHAPE else value
    if axis is None or rank is None:
        return UNKNOWN
    return MIXED if int(axis) % rank == value.axis else value


def _expanded(op: Any, values: Values) -> Dependence:
    value, axis = values[0], constant_value(op.inputs[1])
    rank = op.outputs[0].shape.rank
    if value.kind is not Kind.ROWS:
        return UNKNOWN if value.kind is Kind.SHAPE else value
    if axis is None or rank is None:
        return UNKNOWN
    new_axis = int(np.ravel(axis)[0]) % rank
    return replace(value, axis=value.axis + (new_axis <= value.axis))


def _squeezed(op: Any, values: Values) -> Dependence:
    value, rank = values[0], op.inputs[0].shape.rank
    if value.kind is not Kind.ROWS:
        return UNKNOWN if value.kind is Kind.SHAPE and op.outputs[0].shape.rank else value
    axes = op.get_attr("squeeze_dims")
    if rank is None or not axes:
        return UNKNOWN
    axes = {axis % rank for axis in axes}
    if value.axis in axes:
        return UNKNOWN
    return replace(value, axis=value.axis - sum(axis < value.axis for axis in axes))


def _transposed(op: Any, values: Values) -> Dependence:
    value, order = values[0], constant_value(op.inputs[1])
    if value.kind is not Kind.ROWS:
        return UNKNOWN if value.kind is Kind.SHAPE else value
    return UNKNOWN if order is None else replace(value, axis=list(order).index(value.axis))


def _reshaped(op: Any, values: Values) -> Dependence:
    value, inputs, out = values[0], op.inputs[0], op.outputs[0]
    if value.kind is Kind.SHAPE:
        is_vector = out.shape.rank == 1
        return value if is_vector else value.parts[0] if len(value.parts) == 1 else UNKNOWN
    parts = parts_of(op.inputs[1], values[1])
    if value.kind is not Kind.ROWS:
        return value if values[1].is_plain else worst(values) or UNKNOWN
    if parts and _keeps_axes_before(inputs, value, parts):
        return replace(value, factor=parts[value.axis].factor)
    if not parts or inputs.shape.rank is None or {*inputs.shape[: value.axis]} - {1}:
        return UNKNOWN  # the entries of a row are not beside each other
    entry, value = inputs.shape[value.axis + 1 :], replace(value, axis=0)
    lengths = [None if part.power or part.factor == -1 else part.factor for part in parts[1:]]
    new_entry = out.shape[1:].merge_with(lengths)
    if value.parts not in ((), DRAWN) and _block(entry, new_entry, value) != value.factor:
        return UNKNOWN
    if parts[0].power == 1 and not any(part.power for part in parts[1:]):
        return replace(value, factor=parts[0].factor or _block(entry, new_entry, value))
    if parts[0].power or parts[0].factor != -1:
        is_fixed = not parts[0].power and (parts[0].factor or 0) > 1
        return MIXED if is_fixed else UNKNOWN  # rows in a fixed number of groups
    if any(part.power for part in parts[1:]):
        return UNKNOWN
    block = _block(entry, new_entry, value)
    if block is None and entry == new_entry and entry.is_fully_defined():
        block = value.factor
    if block is None and not _suffix_divides(entry, new_entry):
        return UNKNOWN
    return replace(value, factor=block)


def _keeps_axes_before(tensor: Any, value: Dependence, parts: Sequence[Dependence]) -> bool:
    """Returns whether a reshape changes only the axis of the rows and those behind it."""
    axis = value.axis
    if not axis or value.parts not in ((), DRAWN) or len(parts) <= axis:
        return False
    before, others = tensor.shape[:axis].as_list(), (*parts[:axis], *parts[axis + 1 :])
    lengths = [part.factor for part in parts if part.factor is not None]
    is_known = len(lengths) == len(parts) and None not in before
    if parts[axis].power != 1 or any(part.power for part in others) or not is_known:
        return False
    if any(new not in (old, -1) for new, old in zip(lengths, before, strict=False)):
        return False
    if -1 not in lengths[:axis]:
        return True
    # The length that TensorFlow computes is the one before if each row has as many entries.
    entry = tensor.shape[axis + 1 :]
    is_known = value.factor is not None and entry.is_fully_defined() and -1 not in lengths[axis:]
    return is_known and math.prod(lengths[axis:]) == value.factor * math.prod(entry)


def _block(entry: tf.TensorShape, new: tf.TensorShape, value: Dependence) -> int | None:
    """Returns how many leading entries of a reshaped tensor a row has, if that is known."""
    if value.factor is None or not (entry.is_fully_defined() and new.is_fully_defined()):
        return None
    per_row, per_entry = math.prod(entry) * value.factor, math.prod(new)
    return per_row // per_entry if per_entry and per_row % per_entry == 0 else None


def _suffix_divides(entry: tf.TensorShape, new: tf.TensorShape) -> bool:
    """Returns whether the last axes of an entry, which are known, make up those of a new one."""
    if not new.is_fully_defined():
        return False
    row_size, suffix_size = math.prod(new), 1
    for length in reversed(entry.as_list()):
        if length is None:
            break
        suffix_size *= length
    return bool(row_size) and suffix_size % row_size == 0


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
    axis_from_end = axes[0] - len(parts)
    if -axis_from_end <= tensor.shape.rank and tensor.shape[axis_from_end] != 1:
        return UNKNOWN
    return rows(axes[0], parts[axes[0]].factor, value.power)


def _tiled(op: Any, values: Values) -> Dependence:
    value, parts = values[0], parts_of(op.inputs[1], values[1])
    if value.kind is Kind.ROWS and parts is not None and parts[value.axis] == size(1):
        return value if not any(part.power for part in parts) else MIXED
    return (
        UNKNOWN if value.kind is Kind.ROWS else _spread(op.inputs[0], value, parts, op.outputs[0])
    )


def _broadcast_shape(op: Any, values: Values) -> Dependence:
    """`BroadcastArgs`: the shape that two tensors have together."""
    shapes = [parts_of(t, v) for t, v in zip(op.inputs, values, strict=True)]
    known_shapes = [parts for parts in shapes if parts is not None]
    if len(known_shapes) < len(shapes):
        return worst(values) or UNKNOWN
    short, long = sorted(known_shapes, key=len)
    one = size(1)
    short = (one,) * (len(long) - len(short)) + short
    if any(one not in pair and pair[0] != pair[1] for pair in zip(short, long, strict=True)):
        return UNKNOWN
    parts = tuple(b if a == one else a for a, b in zip(short, long, strict=True))
    return Dependence(Kind.SHAPE, parts=parts)


def _drawn(op: Any, values: Values) -> Dependence:
    """Random numbers: every replica draws its rows of the global draw, or the same numbers."""
    parts = parts_of(op.inputs[0], values[0])
    if parts is None:
        return worst(values) or UNKNOWN
    others = {value for value in values[1:] if not value.is_plain}
    if not any(part.power for part in parts):
        return worst(values) or UNKNOWN if others else FREE
    is_led = parts[0].power == 1 and not any(part.power for part in parts[1:])
    draws = rows(0, parts[0].factor)
    if not op.type.startswith("Stateless"):
        draws = replace(draws, parts=DRAWN)
    return draws if is_led and others <= {draws} else worst(values) or UNKNOWN


def _drawn_from(op: Any, values: Values) -> Dependence:
    """`StatelessMultinomial`: draws from the distribution of each row."""
    value, *others = values
    is_row_wise = value.is_row_wise and all(v.is_plain for v in others)
    return value if is_row_wise else worst(values) or UNKNOWN


def _rules() -> dict[str, Rule]:
    rules: dict[str, Rule] = dict.fromkeys(_DRAWS.split(), _drawn)
    rules |= dict.fromkeys(["Fill", "BroadcastTo"], _filled)
    return rules | {
        "Split": given_plain(_split, 0), "SplitV": given_plain(_split, 1, 2),
        "Shape": _shape, "Size": _num_elements, "Pack": _packed, "Unpack": _unpacked,
        "ConcatV2": given_plain(_concatenated, -1), "ExpandDims": given_plain(_expanded, 1),
        "Squeeze": _squeezed, "Transpose": given_plain(_transposed, 1), "Reshape": _reshaped,
        "Tile": _tiled,
        "BroadcastArgs": _broadcast_shape, "StatelessMultinomial": _drawn_from,
    }  # fmt: skip


#: The rules, by type of operation.
RULES = _rules()
