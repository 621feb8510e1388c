"""Static analysis of a traced graph: how its tensors depend on the rows of a batch.

The analysis follows the axis of the rows from the inputs through the graph, operation by operation,
into functions, branches and loops. What it finds holds for all weights and rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from tfdist.rows.dependence import (
    FREE,
    MIXED,
    UNKNOWN,
    Dependence,
    Kind,
    joined,
    summed,
    worst,
)
from tfdist.rows.map_loops import of_row, row_loop
from tfdist.rows.rules import OF_ROUNDS, RULES
from tfdist.upstream.tensorflow_graphs import (
    BRANCHES,
    CALLS,
    LOOPS,
    function_graph,
    has_custom_gradient,
)

#: Passes through the body of a loop until the classes of its variables have to settle.
_MAX_PASSES = 8

_WRITES = ("Assign", "ResourceScatter", "ResourceApply", "ResourceSparseApply", "Scatter")


class RowAnalysis:
    """The classes of the tensors of one graph.

    Args:
        sources: Tensors of known classes. Whatever depends on none of them is FREE.
        unknown: As the attribute, to be extended.

    Attributes:
        unknown: Types of the operations whose outputs could not be classified, in order.
    """

    def __init__(
        self, sources: Iterable[tuple[Any, Dependence]], unknown: list[str] | None = None
    ) -> None:
        self.unknown = [] if unknown is None else unknown
        self._known = {tensor.ref(): value for tensor, value in sources}
        self._written: dict[int, frozenset[Any]] = {}

    def of(self, tensor: Any) -> Dependence:
        """Returns the class of a tensor."""
        todo = [tensor]
        while todo:
            last = todo[-1]
            if last.ref() in self._known:
                todo.pop()
                continue
            missing = [t for t in last.op.inputs if t.ref() not in self._known]
            if missing:
                todo += missing
                continue
            todo.pop()
            values = [self._known[t.ref()] for t in last.op.inputs]
            outputs = self._of_op(last.op, values)
            if UNKNOWN in outputs and UNKNOWN not in values:
                self.unknown.append(last.op.type)
            for output, value in zip(last.op.outputs, outputs, strict=True):
                self._known.setdefault(output.ref(), value)
        return self._known[tensor.ref()]

    def set(self, tensor: Any, value: Dependence) -> None:
        """Sets the class of a tensor, before the classes of tensors that depend on it."""
        self._known[tensor.ref()] = value

    def unknown_operations(self) -> str:
        """Returns the operations that could not be classified, as a predicate."""
        names = f" ({' and '.join(dict.fromkeys(self.unknown))})" if self.unknown else ""
        return f"uses operations that the row analysis cannot follow{names}"

    def _of_op(self, op: Any, values: Sequence[Dependence]) -> list[Dependence]:
        if (of_row_alone := of_row(values)) is not None:
            return [of_row_alone] * len(op.outputs)
        if op.type in CALLS:
            graph = function_graph(op, "f")
            if graph is None or len(graph.inputs) != len(values):
                return [worst(values) or UNKNOWN] * len(op.outputs)
            return self._of_graph(graph, values)
        if op.type in BRANCHES:
            return self._of_branches(op, values)
        if op.type in LOOPS:
            return self._of_loop(op, values)
        if op.type == "IdentityN":
            return _of_custom_gradient(op, values)
        if op.type == "ReadVariableOp":
            is_written = op.inputs[0].ref() in self._written_in(op.graph)
            return [UNKNOWN if is_written else FREE]
        has_round = any(value.kind is Kind.ROUND for value in values)
        rule = RULES.get(op.type) if op.type in OF_ROUNDS or not has_round else None
        if rule is not None:
            of_outputs = rule(op, values)
            if isinstance(of_outputs, list):
                return of_outputs
            return [of_outputs] * len(op.outputs)
        value = FREE if all(value.is_plain for value in values) else worst(values) or UNKNOWN
        return [value] * len(op.outputs)

    def _of_graph(
        self, graph: Any, values: Sequence[Dependence], tensors: Sequence[Any] | None = None
    ) -> list[Dependence]:
        """Returns the classes of tensors of a function's graph, by default of its outputs."""
        inner = RowAnalysis(zip(graph.inputs, values, strict=True), self.unknown)
        return [inner.of(tensor) for tensor in (graph.outputs if tensors is None else tensors)]

    def _of_branches(self, op: Any, values: Sequence[Dependence]) -> list[Dependence]:
        """Returns the classes after branches, of which all replicas have to take the same one."""
        condition, *arguments = values
        if not condition.is_plain:
            return [worst([condition]) or UNKNOWN] * len(op.outputs)
        names = ("then_branch", "else_branch")
        graphs = (
            [function_graph(op, name) for name in names]
            if op.type.endswith("If")
            else function_graph(op, "branches") or [None]
        )
        if any(graph is None or len(graph.inputs) != len(arguments) for graph in graphs):
            return [worst(arguments) or UNKNOWN] * len(op.outputs)
        first, *others = [self._of_graph(graph, arguments) for graph in graphs]
        for other in others:
            first = [joined(a, b) for a, b in zip(first, other, strict=True)]
        return first

    def _of_loop(self, op: Any, values: Sequence[Dependence]) -> list[Dependence]:
        """Returns the classes after a loop: those that one more round does not change."""
        body, condition = function_graph(op, "body"), function_graph(op, "cond")
        current = list(values)
        if body is None or condition is None:
            return [worst(values) or UNKNOWN] * len(op.outputs)
        if (of_rows := row_loop(body, condition, values, self._of_graph)) is not None:
            return of_rows
        for _ in range(_MAX_PASSES):
            after = self._of_graph(body, current)
            new = [joined(a, b) for a, b in zip(current, after, strict=True)]
            if new == current:
                break
            current = new
        else:
            return [worst(values) or UNKNOWN] * len(op.outputs)
        continues = self._of_graph(condition, current)[0]
        if continues.is_plain:
            return current
        # Other replicas would make another number of rounds. That hides no values that mix the rows
        # in every round.
        is_mixed = continues.kind is Kind.MIXED
        return [MIXED if is_mixed or value.contains_mixed else UNKNOWN for value in current]

    def _written_in(self, graph: Any) -> frozenset[Any]:
        """Returns the handles of variables that operations of a graph assign to."""
        if id(graph) not in self._written:
            writes = (op for op in graph.get_operations() if op.type.startswith(_WRITES))
            self._written[id(graph)] = frozenset(op.inputs[0].ref() for op in writes if op.inputs)
        return self._written[id(graph)]


def _of_custom_gradient(op: Any, values: Sequence[Dependence]) -> list[Dependence]:
    """Returns the classes of a function with a gradient of its own, which may mix rows as well."""
    if not has_custom_gradient(op):
        return list(values)
    if any(value.kind not in (Kind.ROWS, Kind.FREE) for value in values):
        return [worst(values) or UNKNOWN] * len(values)
    sources, upstream = list(zip(op.inputs, values, strict=True)), []
    float_inputs = [t for t in op.inputs if t.dtype.is_floating]
    with op.graph.as_default():
        for output, value in zip(op.outputs, values, strict=True):
            if output.dtype.is_floating:
                upstream.append(tf.compat.v1.placeholder(output.dtype, output.shape))
                # The gradient of what is the same on every replica is a sum over its rows.
                sources.append((upstream[-1], value if value.kind is Kind.ROWS else summed(0)))
        floats = [output for output in op.outputs if output.dtype.is_floating]
        try:
            gradients = tf.gradients(floats, float_inputs, upstream)
        except (ValueError, TypeError, LookupError, NotImplementedError):
            return [UNKNOWN] * len(values)
    analysis, by_input = RowAnalysis(sources), {t.ref(): v for t, v in sources}
    for tensor, gradient in zip(float_inputs, gradients, strict=True):
        if gradient is None:
            continue
        value = by_input[tensor.ref()]
        if isinstance(gradient, tf.IndexedSlices):
            return [UNKNOWN] * len(values)
        kind = analysis.of(gradient)
        is_right = kind.is_sum
        if value.kind is Kind.ROWS:
            is_right = kind.is_plain or replace(kind, factor=value.factor) == value
        if not is_right:
            return [worst([kind]) or MIXED] * len(values)
    return list(values)
