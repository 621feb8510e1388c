"""Loops with one round for each row of a batch, as `tf.map_fn` makes them.

In such a loop a counter runs from zero to the number of rows. Each round reads the entries of lists
at the counter, and writes its results to lists at the counter. What a round computes from the
entries of its row alone has the class ROW, and the list of the results has one entry per row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfdist.rows.dependence import UNKNOWN, Dependence, Kind, Values, size, worst
from tfdist.rows.rules.selection import row_list
from tfdist.upstream.tensorflow_graphs import constant_value

#: Returns the classes of tensors of a graph, given the classes of the graph's inputs.
AnalyzeFn = Callable[[Any, Values, Sequence[Any]], list[Dependence]]


def row_loop(
    body: Any, condition: Any, values: Values, analyze: AnalyzeFn
) -> list[Dependence] | None:
    """Returns the classes after a loop over rows; None if the loop is another one."""
    ends = [_source(output) for output in body.outputs]
    counters = {
        place
        for place, (start, end) in enumerate(zip(body.inputs, ends, strict=True))
        if values[place].is_zero and _is_next(end, start)
    }
    kept = {i for i, (start, end) in enumerate(zip(body.inputs, ends, strict=True)) if start is end}
    factor = _entries_per_row(condition, values, counters, kept)
    if factor is None:
        return None
    after, items = list(values), {}
    for place, (start, end) in enumerate(zip(body.inputs, ends, strict=True)):
        if place in counters:
            after[place] = Dependence(Kind.ROUND, factor=factor)
        elif place not in kept:
            is_empty = values[place] == Dependence(Kind.LIST, 1, factor=factor)
            if not (is_empty and _is_filled(start, end)):
                return None
            items[place] = end.op.inputs[2]
    indices = [ends[place].op.inputs[1] for place in items]
    classes = analyze(body, after, [*items.values(), *indices])
    for place, item, index in zip(items, classes, classes[len(items) :], strict=False):
        is_own = item.is_plain or (item.kind is Kind.ROW and item.factor == factor)
        if index.kind is not Kind.ROUND or not is_own:
            after[place] = worst([item]) or UNKNOWN
        else:
            after[place] = row_list(factor)
    return [size(factor, 1) if i in counters else value for i, value in enumerate(after)]


def of_row(values: Values) -> Dependence | None:
    """Returns the class of what is computed from a round's row; None if nothing of it is used."""
    of_round = {value for value in values if value.kind is Kind.ROW}
    if not of_round:
        return None
    others = [value for value in values if value.kind is not Kind.ROW]
    # A list that holds nothing of other rows is as good as a number.
    others += [part for value in others if value.kind is Kind.LIST for part in value.parts]
    if len(of_round) == 1 and all(value.is_plain or value.kind is Kind.LIST for value in others):
        return of_round.pop()
    return worst(others) or UNKNOWN


def _source(tensor: Any) -> Any:
    """Returns the tensor of which another one is the identity."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def _is_next(end: Any, start: Any) -> bool:
    """Returns whether a tensor is another one plus 1."""
    if end.op.type not in ("Add", "AddV2"):
        return False
    one, other = end.op.inputs
    return _source(one) is start and constant_value(other) == 1


def _is_filled(start: Any, end: Any) -> bool:
    """Returns whether a round does nothing to a list but set one entry."""
    if end.op.type != "TensorListSetItem" or _source(end.op.inputs[0]) is not start:
        return False
    users, todo = [], [start]
    for tensor in todo:
        users += [op for op in tensor.consumers() if op.type != "Identity"]
        todo += [op.outputs[0] for op in tensor.consumers() if op.type == "Identity"]
    return users == [end.op]


def _entries_per_row(
    condition: Any, values: Values, counters: set[int], kept: set[int]
) -> int | None:
    """Returns how many rounds a loop makes for each row; None if it does not end with the rows."""
    places = {tensor.ref(): place for place, tensor in enumerate(condition.inputs)}
    factors, todo = set(), [_source(condition.outputs[0])]
    for tensor in todo:
        if tensor.op.type == "LogicalAnd":
            todo += [_source(each) for each in tensor.op.inputs]
            continue
        if tensor.op.type != "Less":
            return None
        counter, bound = (places.get(_source(each).ref()) for each in tensor.op.inputs)
        if counter not in counters or bound not in kept or values[bound].power != 1:
            return None
        factors.add(values[bound].factor if values[bound].kind is Kind.FREE else None)
    return factors.pop() if len(factors) == 1 else None
