"""Rules of the operations that `tf.vectorized_map` makes of a map over rows.

It gathers all rows of a batch at the places 0, 1, 2, ... To multiply weights by rows, it swaps two
axes, by a transposition and a reshape. If one of the two axes has length 1, both leave the entries
in place: it then omits the transposition, depending on the number of rows.

A branch gets the rows that take it. What a branch returns for all of them, without looking at any,
is repeated as often as there are such rows.

These rules take precedence, and leave other uses of the operations to the other modules.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tfdist.rows.dependence import (
    UNKNOWN,
    Dependence,
    Kind,
    Rule,
    Values,
    rows,
    size,
    worst,
)
from tfdist.rows.rules import elementwise, selection, shapes
from tfdist.upstream.tensorflow_graphs import constant_value


def _range(op: Any, values: Values) -> Dependence:
    """`Range`: places if it counts all entries of the rows."""
    start, end, step = values
    is_all = start.is_zero and end.kind is Kind.FREE and end.power == 1 and step == size(1)
    if is_all and end.factor:
        return Dependence(Kind.PLACES, factor=end.factor)
    return elementwise.elementwise_rule(op, values) if all(v.is_plain for v in values) else UNKNOWN


def _greater(op: Any, values: Values) -> Dependence | list[Dependence]:
    number, one = values
    if number.kind is Kind.FREE and number.power == 1 and number.factor and one == size(1):
        return Dependence(Kind.SEVERAL, factor=number.factor)
    return elementwise.RULES["Greater"](op, values)


def _selected(op: Any, values: Values) -> Dependence | list[Dependence]:
    """`SelectV2`: with a single entry, the place 0 is that of all entries."""
    condition, places, other = values
    if condition.kind is not Kind.SEVERAL:
        return elementwise.RULES["SelectV2"](op, values)
    is_place = places.kind is Kind.PLACES and places.factor == condition.factor
    return places if is_place and other.is_zero else worst(values) or UNKNOWN


def _partitioned(op: Any, values: Values) -> Dependence | list[Dependence]:
    """`DynamicPartition`: the places of the rows that take each branch of a condition."""
    places, numbers = values
    is_by_row = numbers.kind is Kind.ROWS and numbers.is_row_wise and numbers.factor is not None
    if places.kind is not Kind.PLACES or not is_by_row or places.factor != numbers.factor:
        return worst(values) or UNKNOWN
    return [selection.selected_places(output, numbers.factor) for output in op.outputs]


def _stitched(op: Any, values: Values) -> Dependence:
    """`DynamicStitch`: what the branches computed from their rows, in the order of the rows."""
    number = op.get_attr("N")
    tensors, places, entries = op.inputs[:number], values[:number], values[number:]
    partition = tensors[0].op
    is_complete = partition.type == "DynamicPartition" and {t.ref() for t in tensors} == {
        output.ref() for output in partition.outputs
    }
    is_own = [place.parts == (entry,) for place, entry in zip(places, entries, strict=True)]
    if not is_complete or places[0].kind is not Kind.SELECTED_PLACES or not all(is_own):
        return worst(values) or UNKNOWN
    return rows(factor=places[0].factor)


def _size(op: Any, values: Values) -> Dependence | list[Dependence]:
    """`Size`: how many places there are."""
    value = values[0]
    if value.kind is Kind.PLACES:
        return size(value.factor, 1)
    if value.kind is Kind.SELECTED_PLACES:
        is_vector = op.inputs[0].shape.rank == 1
        return replace(value, kind=Kind.SELECTED_SIZES, factor=None) if is_vector else UNKNOWN
    return shapes.RULES["Size"](op, values)


def _joined(kind: str) -> Rule:
    """Returns the rule of `Pack` or `ConcatV2`, which also join numbers to a vector of sizes."""
    other = shapes.RULES[kind]
    return lambda op, values: (
        _sizes(op, values) if values[0].kind is Kind.SELECTED_SIZES else other(op, values)
    )


def _sizes(op: Any, values: Values) -> Dependence:
    """Returns the class of a vector that begins with a number of selected rows."""
    first, *others = values
    is_vector = op.outputs[0].shape.rank == 1
    return first if is_vector and all(value.is_plain for value in others) else UNKNOWN


def _tiled(op: Any, values: Values) -> Dependence | list[Dependence]:
    """`Tile`: the same entry for each of the selected rows."""
    value, sizes = values
    if sizes.kind is not Kind.SELECTED_SIZES:
        return shapes.RULES["Tile"](op, values)
    shape = op.inputs[0].shape
    is_entry = shape.rank is not None and shape[0] == 1
    return sizes.parts[0] if value.is_plain and is_entry else worst([value]) or UNKNOWN


def _transposed(op: Any, values: Values) -> Dependence | list[Dependence]:
    if values[0].is_led_by_rows and op.inputs[0].shape.rank == 3 and _is_swap_if_needed(*op.inputs):
        return replace(values[0], kind=Kind.SWAPPED)
    return shapes.RULES["Transpose"](op, values)


def _is_swap_if_needed(tensor: Any, order: Any) -> bool:
    """Returns whether an order swaps the first two axes unless one of them has length 1."""
    if order.op.type not in ("Select", "SelectV2"):
        return False
    is_short, *orders = order.op.inputs
    if [np.ravel(constant_value(each)).tolist() for each in orders] != [[0, 1, 2], [1, 0, 2]]:
        return False
    if is_short.op.type != "Equal" or constant_value(is_short.op.inputs[1]) != 1:
        return False
    shorter = is_short.op.inputs[0].op
    if shorter.type != "Minimum":
        return False
    return [_axis_of(length, tensor) for length in shorter.inputs] == [0, 1]


def _axis_of(length: Any, tensor: Any) -> int | None:
    """Returns the axis of a tensor whose length is a number; None if it is another number."""
    if length.op.type != "StridedSlice" or length.shape.rank != 0:
        return None
    shape, begin = length.op.inputs[0].op, constant_value(length.op.inputs[1])
    is_own = shape.type == "Shape" and shape.inputs[0] is tensor
    return int(begin[0]) if is_own and begin is not None else None


def _reshaped(op: Any, values: Values) -> Dependence | list[Dependence]:
    value = values[0]
    if value.kind is Kind.SELECTED_SIZES:
        return _sizes(op, values)
    if value.kind is not Kind.SWAPPED:
        return shapes.RULES["Reshape"](op, values)
    _, *others = op.inputs[0].op.inputs[0].shape
    found = shapes.parts_of(op.inputs[1], values[1])
    expected = (size(others[0]), size(value.factor, 1), size(others[1]))
    if None in (*others, value.factor) or found != expected:
        return worst(values[1:]) or UNKNOWN
    return replace(value, kind=Kind.ROWS, axis=1)


#: The rules, by type of operation.
RULES: dict[str, Rule] = {
    "Range": _range, "Greater": _greater, "SelectV2": _selected,
    "Transpose": _transposed, "Reshape": _reshaped, "DynamicPartition": _partitioned,
    "DynamicStitch": _stitched, "Size": _size, "Pack": _joined("Pack"),
    "ConcatV2": _joined("ConcatV2"), "Tile": _tiled,
}  # fmt: skip

#: Operations whose rules know places, and whether there are several.
OF_PLACES = frozenset(["DynamicPartition", "GatherV2", "Identity", "SelectV2", "Size"])

#: Operations whose rules know the number of selected rows.
OF_SELECTED_SIZES = frozenset(["ConcatV2", "Identity", "Pack", "Reshape", "Tile"])
