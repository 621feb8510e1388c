"""What the way back reads of joined variables is joined once more, so that it need not be kept.

TensorFlow's gradients read the tensors of the forward pass. Their inputs are exchanged for others,
of the same elements, that are there later. A join waits for a gradient that is there before, so
that no circle comes of it: gradients are made in an order in which they can be computed.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import tensorflow as tf

from tfdist.upstream.tensorflow_graphs import exchange_input

if TYPE_CHECKING:
    from tfdist.step.joins import Join

#: Operations that ask for sizes, which are known, and so keep no elements.
_OF_SIZES = ("Shape", "ShapeN", "Size", "Rank")


class _Use(NamedTuple):
    """An operation of the way back that reads what was joined.

    Attributes:
        place: Its number among the operations of the graph.
        operation: Itself.
        read: What it takes.
    """

    place: int
    operation: tf.Operation
    read: tf.Tensor


def join_again(graph: tf.Graph, num_before: int, joins: Sequence[Join]) -> None:
    """Lets operations read variables that are joined for them.

    Args:
        graph: That is traced.
        num_before: Operations that it had before gradients were taken.
        joins: Of the forward pass.
    """
    if not joins:
        return
    operations = enumerate(graph.get_operations())
    made = {own.name: place for place, own in operations if place >= num_before}
    with_uses = [(join, uses) for join in joins if (uses := _uses(join, made))]
    gate: tf.Tensor | None = None
    for join, uses in sorted(with_uses, key=lambda pair: pair[1][0].place):
        if gate is not None:  # what is used first has only just been read
            with tf.control_dependencies([gate]):
                whole = join.variable.joined(join.whole.dtype)
            for use in uses:
                exchange_input(use.operation, use.read, whole)
        gate = _gradient_into(uses[0], made, gate)


def _uses(join: Join, made: Mapping[str, int]) -> list[_Use]:
    """Returns the operations that use a join, the first to be computed first."""
    found = [
        _Use(made[own.name], own, read)
        for read in join.reads
        for own in read.consumers()
        if own.name in made and own.type not in _OF_SIZES
    ]
    return sorted(found, key=operator.attrgetter("place"))


def _gradient_into(
    use: _Use, made: Mapping[str, int], otherwise: tf.Tensor | None
) -> tf.Tensor | None:
    """Returns a gradient that an operation takes, for others to wait for."""
    inputs = use.operation.inputs
    return next((t for t in inputs if t is not use.read and t.op.name in made), otherwise)
