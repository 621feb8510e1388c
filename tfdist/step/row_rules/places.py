"""Rules of the places of all rows, at which `tf.vectorized_map` takes them from their batch."""

from __future__ import annotations

from typing import Any

from tfdist.step.row_dependence import (
    UNKNOWN,
    Dependence,
    Kind,
    Rule,
    Values,
    size,
    worst,
)
from tfdist.step.row_rules.elementwise import elementwise_rule, select_rule


def _range(op: Any, values: Values) -> Dependence:
    """`Range`: places if it counts all entries of the rows."""
    start, end, step = values
    is_all = start.is_zero and end.kind is Kind.FREE and end.power == 1 and step == size(1)
    if is_all and end.factor:
        return Dependence(Kind.PLACES, factor=end.factor)
    return elementwise_rule(op, values) if all(v.is_plain for v in values) else UNKNOWN


def _greater(op: Any, values: Values) -> Dependence:
    number, one = values
    if number.kind is Kind.FREE and number.power == 1 and number.factor and one == size(1):
        return Dependence(Kind.SEVERAL, factor=number.factor)
    return elementwise_rule(op, values)


def _selected(op: Any, values: Values) -> Dependence:
    """`SelectV2`: with a single entry, the place 0 is that of all entries."""
    condition, places, other = values
    if condition.kind is Kind.SEVERAL:
        is_place = places.kind is Kind.PLACES and places.factor == condition.factor
        return places if is_place and other.is_zero else worst(values) or UNKNOWN
    return select_rule(op, values)


#: The rules, by type of operation.
RULES: dict[str, Rule] = {"Range": _range, "Greater": _greater, "SelectV2": _selected}

#: Operations whose rules know places, and whether there are several.
OF_PLACES = frozenset(["GatherV2", "Identity", "SelectV2"])
