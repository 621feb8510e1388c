"""Rules of slices, lookups and other selections of entries, and of the lists of loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.rows import dependence
from tfdist.rows.dependence import (
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
    worst,
)
from tfdist.rows.rules.elementwise import constant
from tfdist.rows.rules.shapes import parts_of
from tfdist.upstream.tensorflow_graphs import constant_value


def _sliced(op: Any, values: Values) -> Dependence:
    value, begins, lengths = values[0], *(constant_value(t) for t in list(op.inputs)[1:])
    if value.kind is Kind.SHAPE:
        if begins is None or lengths is None:
            return UNKNOWN
        begin, length = int(begins[0]), int(lengths[0])
        end = len(value.parts) if length < 0 else begin + length
        return replace(value, parts=value.parts[begin:end])
    if value.kind is not Kind.ROWS:
        return value if values[2].is_plain else worst(values) or UNKNOWN
    first = parts_of(op.inputs[1], values[1])
    number = parts_of(op.inputs[2], values[2])
    if first is None or number is None:
        return worst(values) or UNKNOWN
    if not first[value.axis].is_zero:
        return MIXED if first[value.axis].factor else UNKNOWN
    of_rows = number[value.axis]
    is_whole = of_rows in (size(-1), size(value.factor, 1)) and of_rows.factor is not None
    has_equal_rows = all(n.is_plain for axis, n in enumerate(number) if axis != value.axis)
    return value if is_whole and has_equal_rows else UNKNOWN


def _strided(op: Any, values: Values) -> Dependence:
    """`StridedSlice`, also of the row of a round, at its number in a vector of places."""
    value, begin = values[:2]
    if begin.kind is Kind.ROUND and value.kind is not Kind.ROUND and _takes_one_entry(op):
        return row_of(value, begin)
    if value.kind is Kind.ROUND or not all(bound.is_plain for bound in values[1:]):
        return worst(values) or UNKNOWN
    if value.kind in (Kind.MIXED, Kind.UNKNOWN, Kind.LIST):
        return worst(values) or UNKNOWN
    if value.kind is Kind.SUMMED:
        return value
    if value.kind is Kind.FREE:
        return value if value.power or value.is_zero else constant(op, [])
    bounds = [_bound(tensor) for tensor in list(op.inputs)[1:]]
    masks = [
        op.get_attr(f"{name}_mask")
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    ]
    if any(bound is None for bound in bounds[:1] + bounds[2:]):
        return UNKNOWN
    if value.kind is Kind.SHAPE:
        return _entries(value, bounds, masks)
    rank, in_axis, out_axis = op.inputs[0].shape.rank, 0, 0
    if rank is None:
        return UNKNOWN
    count, new_axes = len(bounds[0]), bin(masks[3]).count("1")
    for index in range(count):
        bit = 1 << index
        if masks[2] & bit:
            skipped = rank - (count - 1 - new_axes)
            if in_axis <= value.axis < in_axis + skipped:
                return replace(value, axis=out_axis + value.axis - in_axis)
            in_axis, out_axis = in_axis + skipped, out_axis + skipped
            continue
        if masks[3] & bit:
            out_axis += 1
            continue
        if in_axis == value.axis:
            from_start = masks[0] & bit or bounds[0][index] == 0
            is_whole = from_start and masks[1] & bit and bounds[2][index] == 1
            if is_whole and not masks[4] & bit:
                return replace(value, axis=out_axis)
            return UNKNOWN if bounds[1] is None and not masks[4] & bit else MIXED
        in_axis, out_axis = in_axis + 1, out_axis + (not masks[4] & bit)
    return replace(value, axis=out_axis + value.axis - in_axis)


def _takes_one_entry(op: Any) -> bool:
    """Returns whether a slice takes one entry along the first axis, and all along the others."""
    kinds = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    begins, ends, ellipsis, new_axes, shrunk = (op.get_attr(f"{kind}_mask") for kind in kinds)
    strides = constant_value(op.inputs[3])
    if strides is None or shrunk != 1 or new_axes or (begins | ends | ellipsis) & 1:
        return False
    is_whole = [bool((ellipsis | begins & ends) >> axis & 1) for axis in range(1, len(strides))]
    return all(is_whole) and bool(np.all(strides == 1))


def _bound(tensor: Any) -> Any:
    """Returns begins, ends or strides, with None for entries that are not constant.

    TensorFlow computes some of constants: the place of the last size as the rank minus 1.
    """
    value = tf.get_static_value(tensor, partial=True)
    return value if value is not None and None not in value else constant_value(tensor)


def _entries(value: Dependence, bounds: list[Any], masks: list[int]) -> Dependence:
    """Returns the class of entries of a vector of sizes."""
    if len(bounds[0]) != 1 or masks[2] or masks[3]:
        return UNKNOWN
    if any(bound is not None and bound[0] is None for bound in bounds):
        return UNKNOWN
    begin = None if masks[0] & 1 else int(bounds[0][0])
    if masks[4] & 1:
        index = begin or 0
        return value.parts[index] if -len(value.parts) <= index < len(value.parts) else UNKNOWN
    if bounds[1] is None and not masks[1] & 1:
        return UNKNOWN
    end = None if masks[1] & 1 else int(bounds[1][0])
    return replace(value, parts=value.parts[begin : end : int(bounds[2][0])])


def _padded(op: Any, values: Values) -> Dependence:
    value, widths = values[0], constant_value(op.inputs[1])
    if value.kind is not Kind.ROWS:
        return UNKNOWN if value.kind is Kind.SHAPE else value
    if widths is None or value.power:
        return UNKNOWN
    return MIXED if np.any(widths[value.axis]) else value


def _gathered(op: Any, values: Values) -> Dependence:
    """`GatherV2`, `Gather` and `ResourceGather`: entries of a table, or entries of each row."""
    table, indices = values[0], values[1]
    if indices.kind is Kind.ROUND:
        is_one = op.type == "GatherV2" and not op.get_attr("batch_dims")
        is_entry = is_one and op.inputs[1].shape.rank == constant_value(op.inputs[2]) == 0
        return row_of(table, indices) if is_entry else UNKNOWN
    if table.kind is Kind.SHAPE:
        places = constant_value(op.inputs[1])
        if places is None or not np.all(np.isin(places, range(len(table.parts)))):
            return UNKNOWN
        parts = tuple(table.parts[int(place)] for place in np.ravel(places))
        return parts[0] if np.ndim(places) == 0 else replace(table, parts=parts)
    if (bad := worst(values[:2])) is not None:
        return bad
    axis = constant_value(op.inputs[2]) if op.type == "GatherV2" else 0
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
            is_by_row
            and (table.factor, table.parts) == (indices.factor, indices.parts)
            and not (table.power or indices.power)
        )
        return table if is_alike else UNKNOWN
    if indices.kind is Kind.ROWS:
        return MIXED if table.axis == axis else UNKNOWN
    rank = op.inputs[1].shape.rank
    if table.axis == axis or rank is None:
        return MIXED if table.axis == axis else UNKNOWN
    return replace(table, axis=table.axis + (rank - 1 if table.axis > axis else 0))


def row_of(table: Dependence, place: Dependence) -> Dependence:
    """Returns the class of the entry of a tensor at the place of a round."""
    is_whole = table.kind is Kind.ROWS and table.is_row_wise
    if is_whole and table.factor == place.factor is not None:
        return Dependence(Kind.ROW, factor=place.factor)
    return worst([table]) or UNKNOWN


def _one_hot(op: Any, values: Values) -> Dependence:
    value, rank = values[0], op.inputs[0].shape.rank
    if value.kind is Kind.ROWS and value.power:
        return UNKNOWN
    if value.kind is not Kind.ROWS:
        return dependence.elementwise(op.inputs[:1], values[:1], op.outputs[0])
    if rank is None:
        return UNKNOWN
    return replace(value, axis=value.axis + (op.get_attr("axis") % (rank + 1) <= value.axis))


def _rules() -> dict[str, Rule]:
    padded, gathered = given_plain(_padded, 1, 2), given_plain(_gathered, 2)
    rules: dict[str, Rule] = dict.fromkeys(["Pad", "PadV2", "MirrorPad"], padded)
    rules |= dict.fromkeys(["GatherV2", "Gather", "ResourceGather"], gathered)
    return rules | {
        "Slice": given_plain(_sliced, 1), "StridedSlice": _strided,
        "OneHot": given_plain(_one_hot, 1, 2, 3),
    }  # fmt: skip


#: The rules, by type of operation.
def _list_reserved(op: Any, values: Values) -> Dependence:
    """`TensorListReserve`: an empty list with a length."""
    del op
    length = values[1]
    if length.kind is not Kind.FREE:
        return worst(values) or UNKNOWN
    return Dependence(Kind.LIST, length.power, factor=length.factor)


def row_list(factor: int | None) -> Dependence:
    """Returns the class of a list with `factor` elements for each row, computed from that row."""
    of_row = Dependence(Kind.ROW, factor=factor)
    return Dependence(Kind.LIST, 1, factor=factor, parts=(of_row,))


def _list_set(op: Any, values: Values) -> Dependence:
    listed, item = values[0], values[2]
    if listed.kind is not Kind.LIST or not values[1].is_plain:
        return worst(values[1:]) or UNKNOWN
    if op.get_attr("resize_if_index_out_of_bounds"):
        listed = replace(listed, factor=None)
    return dependence.joined(listed, replace(listed, parts=(item,)))


def _list_get(op: Any, values: Values) -> Dependence:
    listed, index = values[0], values[1]
    if listed.kind is not Kind.LIST or not listed.parts:
        return UNKNOWN if listed.kind is Kind.LIST else listed
    item = listed.parts[0]
    is_own = (
        index.is_plain if item.kind is not Kind.ROW else index == replace(item, kind=Kind.ROUND)
    )
    return item if is_own else UNKNOWN


def _list_stacked(op: Any, values: Values) -> Dependence:
    listed = values[0]
    if listed.kind is not Kind.LIST or not listed.parts:
        return UNKNOWN if listed.kind is Kind.LIST else listed
    item = listed.parts[0]
    if item.kind is Kind.ROW:
        return rows(0, item.factor)
    if listed.power and listed.factor != 0:
        return UNKNOWN
    if item.kind is Kind.ROWS:
        return replace(item, axis=item.axis + 1)
    if item.kind is Kind.FREE:
        return size(0 if item.is_zero else None, item.power)
    return item if item.kind is Kind.SUMMED else worst([item]) or UNKNOWN


def _list_of(op: Any, values: Values) -> Dependence:
    value = values[0]
    if value.kind is Kind.ROWS:
        if value.axis == 0 and (value.power or value.factor is None or not value.is_row_wise):
            return UNKNOWN
        if value.axis == 0:
            return row_list(value.factor)
        value = replace(value, axis=value.axis - 1)
    return Dependence(Kind.LIST, parts=(value,)) if worst([value]) is None else value


#: The rules, by type of operation.
RULES = _rules() | {
    "TensorListReserve": _list_reserved,
    "TensorListSetItem": _list_set,
    "TensorListGetItem": _list_get,
    "TensorListStack": _list_stacked,
    "TensorListFromTensor": _list_of,
}
