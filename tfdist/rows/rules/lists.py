"""Rules of TensorFlow's lists of tensors, in which loops keep their results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tfdist.rows import dependence
from tfdist.rows.dependence import UNKNOWN, Dependence, Kind, Rule, Values, rows, size, worst


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
    """`TensorListFromTensor`."""
    value = values[0]
    if value.kind is Kind.ROWS:
        if value.axis == 0 and (value.power or value.factor is None or not value.is_row_wise):
            return UNKNOWN
        if value.axis == 0:
            return row_list(value.factor)
        value = replace(value, axis=value.axis - 1)
    return Dependence(Kind.LIST, parts=(value,)) if worst([value]) is None else value


#: The rules, by type of operation.
RULES: dict[str, Rule] = {
    "TensorListReserve": _list_reserved,
    "TensorListSetItem": _list_set,
    "TensorListGetItem": _list_get,
    "TensorListStack": _list_stacked,
    "TensorListFromTensor": _list_of,
}
