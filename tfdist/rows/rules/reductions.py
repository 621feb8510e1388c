"""Rules of reductions over axes of tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tfdist.rows.dependence import (
    FREE,
    MIXED,
    UNKNOWN,
    Dependence,
    Kind,
    Rule,
    Values,
    beside_each_other,
    elementwise,
    given_plain,
    summed,
    without_factor,
    worst,
)
from tfdist.rows.rules.elementwise import elementwise_rule
from tfdist.rows.rules.shapes import product_of
from tfdist.upstream.tensorflow_graphs import constant_value


def _axes_of(op: Any, place: int = 1) -> list[int] | None:
    """Returns the axes that an input holds, counted from the front; None if they are unknown."""
    axes, rank = constant_value(op.inputs[place]), op.inputs[0].shape.rank
    if axes is None or rank is None:
        return None
    return [int(axis) % rank if rank else 0 for axis in np.ravel(axes)]


def _reduced(op: Any, values: Values, is_linear: bool) -> Dependence:
    """Reductions: `Sum` and `Mean` are linear, others are not."""
    value = values[0]
    if value.kind is Kind.SHAPE:
        is_one = op.type in ("Max", "Min") and len(set(value.parts)) == 1
        return product_of(value) if op.type == "Prod" else value.parts[0] if is_one else UNKNOWN
    if value.kind in (Kind.FREE, Kind.SUMMED):
        if value.kind is Kind.FREE and not value.power:
            return value if value.is_zero else FREE
        return without_factor(value) if is_linear else MIXED
    axes = _axes_of(op)
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


def _one_axis(op: Any, values: Values) -> Dependence:
    """`ArgMax` and `ArgMin`: one axis is left out."""
    value = values[0]
    if value.kind is not Kind.ROWS:
        return elementwise(op.inputs[:1], values[:1], op.outputs[0])
    if value.power:
        return MIXED
    if (axes := _axes_of(op)) is None:
        return UNKNOWN
    if value.axis in axes:
        return MIXED
    return replace(value, axis=value.axis - (axes[0] < value.axis))


def _cumulative(op: Any, values: Values) -> Dependence:
    value = values[0]
    index = 2 if op.type == "Roll" else 1
    if value.kind is not Kind.ROWS:
        return elementwise_rule(op, values)
    if (axes := _axes_of(op, index)) is None:
        return UNKNOWN
    return MIXED if value.axis in axes or value.power else value


def _half_of_squares(op: Any, values: Values) -> Dependence:
    if values[0].kind is Kind.ROWS:
        return MIXED if values[0].power else summed(0)
    return elementwise_rule(op, values)


def _cross_entropy(op: Any, values: Values) -> Dependence:
    """Softmax cross-entropies of logits [rows, classes] and labels."""
    if all(v.is_plain for v in values):
        return FREE
    fits = [
        # A plain tensor may be for a fixed number of rows.
        v.is_led_by_rows or (v.is_plain and t.shape.rank is not None and t.shape[:1] == [1])
        for t, v in zip(op.inputs, values, strict=True)
    ]
    if worst(values) is None and all(fits):
        return beside_each_other(values)
    return worst(values) or MIXED


def _rules() -> dict[str, Rule]:
    rules: dict[str, Rule] = {"L2Loss": _half_of_squares}
    linear = given_plain(lambda op, v: _reduced(op, v, is_linear=True), 1)
    rules |= dict.fromkeys(["Sum", "Mean"], linear)
    names = ["Max", "Min", "Prod", "All", "Any", "EuclideanNorm"]
    rules |= dict.fromkeys(names, given_plain(lambda op, v: _reduced(op, v, is_linear=False), 1))
    names = ["Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2", "Roll"]
    rules |= dict.fromkeys(names, given_plain(_cumulative, 1, 2))
    rules |= dict.fromkeys(["ArgMax", "ArgMin"], given_plain(_one_axis, 1))
    names = ["SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"]
    return rules | dict.fromkeys(names, _cross_entropy)


#: The rules, by type of operation.
RULES = _rules()
