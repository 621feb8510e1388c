"""Rules of rows that a loop over rows reads from a tensor, at the number of the round.

`x[i]` is a slice with the number in a vector of places, or a gather.

These rules take precedence, and leave other uses of the operations to the other modules.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tfdist.rows.dependence import UNKNOWN, Dependence, Kind, Rule, Values, worst
from tfdist.rows.rules import selection, shapes
from tfdist.upstream.tensorflow_graphs import constant_value


def _packed(op: Any, values: Values) -> Dependence | list[Dependence]:
    """`Pack`: the place of a round's row along the first axis, and zeros along the next ones."""
    first, *others = values
    if first.kind is Kind.ROUND and all(value.is_zero for value in others):
        return first if op.outputs[0].shape.rank == 1 else UNKNOWN
    return shapes.RULES["Pack"](op, values)


def _sliced(op: Any, values: Values) -> Dependence | list[Dependence]:
    """`StridedSlice`: the entry of a round, whole along the other axes."""
    table, begin = values[:2]
    if begin.kind is not Kind.ROUND or not _takes_one_entry(op):
        is_other = Kind.ROUND in (table.kind, begin.kind)
        return worst(values) or UNKNOWN if is_other else selection.RULES["StridedSlice"](op, values)
    return selection.row_of(table, begin)


def _takes_one_entry(op: Any) -> bool:
    """Returns whether a slice takes one entry along the first axis, and all along the others."""
    kinds = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    begins, ends, ellipsis, new_axes, shrunk = (op.get_attr(f"{kind}_mask") for kind in kinds)
    strides = constant_value(op.inputs[3])
    if strides is None or shrunk != 1 or new_axes or (begins | ends | ellipsis) & 1:
        return False
    is_whole = [bool((ellipsis | begins & ends) >> axis & 1) for axis in range(1, len(strides))]
    return all(is_whole) and bool(np.all(strides == 1))


#: The rules, by type of operation.
RULES: dict[str, Rule] = {"Pack": _packed, "StridedSlice": _sliced}

#: Operations whose rules know the number of a round.
OF_ROUNDS = frozenset(["GatherV2", "Identity", "TensorListGetItem", "TensorListSetItem", *RULES])
