"""How TensorFlow's operations pass on the dependence on rows: a rule for each type of operation.

A rule gets an operation and the classes of its inputs (`dependence.Dependence`), and returns
the class of its outputs, or of each. Operations without a rule are UNKNOWN as soon as rows reach
them.
"""

from __future__ import annotations

from tfdist.rows.dependence import Rule
from tfdist.rows.rules import elementwise, linear_algebra, reductions, selection, shapes

#: The rules, by type of operation.
RULES: dict[str, Rule] = {
    **elementwise.RULES,
    **linear_algebra.RULES,
    **reductions.RULES,
    **selection.RULES,
    **shapes.RULES,
}

#: Operations whose rules also apply to the number of a round.
OF_ROUNDS = frozenset(
    ["GatherV2", "Identity", "Pack", "StridedSlice", "TensorListGetItem", "TensorListSetItem"]
)
