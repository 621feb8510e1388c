"""How TensorFlow's operations pass on the dependence on rows: a rule for each type of operation.

A rule gets an operation and the classes of its inputs (`row_dependence.Dependence`), and returns
the class of its outputs, or of each. Operations without a rule are UNKNOWN as soon as rows reach
them.
"""

from __future__ import annotations

from tfdist.rows.dependence import Rule
from tfdist.rows.rules import (
    elementwise,
    linear_algebra,
    lists,
    reductions,
    rounds,
    selection,
    shapes,
    vectorized_map,
)

#: The rules, by type of operation.
RULES: dict[str, Rule] = {
    **elementwise.RULES,
    **linear_algebra.RULES,
    **lists.RULES,
    **reductions.RULES,
    **selection.RULES,
    **shapes.RULES,
    **vectorized_map.RULES,
    **rounds.RULES,
}

#: Operations whose rules also apply to the number of a round.
OF_ROUNDS = rounds.OF_ROUNDS

#: Operations whose rules also apply to the places of rows.
OF_PLACES = vectorized_map.OF_PLACES

#: Operations whose rules also apply to places of selected rows.
OF_SELECTED_PLACES = frozenset(
    ["DynamicStitch", "Gather", "GatherV2", "Identity", "Reshape", "Size", "Squeeze"]
)

#: Operations whose rules also apply to numbers of selected rows.
OF_SELECTED_SIZES = vectorized_map.OF_SELECTED_SIZES

#: Operations whose rules also apply to entries of selected rows.
OF_SELECTED_ROWS = frozenset(
    [
        *elementwise.RULES,
        *("DynamicStitch", "ExpandDims", "Reshape", "Squeeze", "Sum", "Mean", "Max", "Min"),
    ]
)
