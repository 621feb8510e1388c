"""Rules of the products of weights and rows in `tf.vectorized_map`, which swaps two axes.

It transposes and reshapes. If one of the two axes has length 1, both leave the entries in place: it
then omits the transposition, depending on the number of rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tfdist.step.row_dependence import UNKNOWN, Dependence, Kind, Rule, Values, size, worst
from tfdist.step.row_rules import shapes
from tfdist.upstream.tensorflow_graphs import constant_value


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
    if value.kind is not Kind.SWAPPED:
        return shapes.RULES["Reshape"](op, values)
    _, *others = op.inputs[0].op.inputs[0].shape
    found = shapes.parts_of(op.inputs[1], values[1])
    expected = (size(others[0]), size(value.factor, 1), size(others[1]))
    if None in (*others, value.factor) or found != expected:
        return worst(values[1:]) or UNKNOWN
    return replace(value, kind=Kind.ROWS, axis=1)


#: The rules, by type of operation.
RULES: dict[str, Rule] = {"Transpose": _transposed, "Reshape": _reshaped}
