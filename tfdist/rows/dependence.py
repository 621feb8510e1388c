"""How a tensor depends on the rows of a batch: the classes of the static analysis.

Every class describes what a replica computes from its rows in comparison with what one device
computes from all rows:

- FREE: a value that no row changes, times a power of the number of rows B.
- ROWS: one entry, or one block of entries, for each row along an axis, each computed from that row
  alone, times a power of B. A replica computes its rows' entries.
- SUMMED: a sum of such entries over the rows, times a power of B. With the power 0 it is a sum over
  rows, and with the power -1 a mean.
- SHAPE: a vector of sizes, some of which are multiples of powers of B.
- LIST: a TensorFlow list, with the class that all of its elements have.
- ROUND: in a loop over rows, the number of the round.
- ROW: in a loop over rows, a value that is computed from the row of the round alone.
- MIXED: a value that is known to combine rows in another way.
- UNKNOWN: a value that the analysis cannot classify.

The rules below are exact: they say ROWS or SUMMED only where that holds for all weights and rows.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf


class Kind(enum.Enum):
    """The kind of dependence; see the module."""

    FREE = "free"
    ROWS = "rows"
    SUMMED = "summed"
    SHAPE = "shape"
    LIST = "list"
    ROUND = "round"
    ROW = "row"
    MIXED = "mixed"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Dependence:
    """How a tensor depends on the rows.

    Attributes:
        kind: The kind.
        power: The power of the number of rows by which a value is multiplied.
        axis: Of ROWS: the axis along which the rows are.
        factor: Of ROWS: the number of entries in the block of a row. Of ROUND and ROW: the number
            of rounds for each row. Of FREE, and of the length of a LIST: the integer by which the
            power of B is multiplied. None if that is unknown. The factor of zeros is 0.
        parts: Of SHAPE: the class of each entry. Of LIST: that of the elements, if there are any.
            Of ROWS: the class of each segment if the tensor is a concatenation along the axis of
            the rows, so that the entries of a row are not beside each other; or DRAWN.
    """

    kind: Kind
    power: int = 0
    axis: int = 0
    factor: int | None = None
    parts: tuple[Dependence, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether this is a value that neither rows nor their number change."""
        if self.kind is Kind.SHAPE:
            return all(part.is_plain for part in self.parts)
        return self.kind is Kind.FREE and (self.power == 0 or self.factor == 0)

    @property
    def is_zero(self) -> bool:
        """Whether this is known to be all zeros."""
        return self.kind is Kind.FREE and self.factor == 0

    @property
    def contains_mixed(self) -> bool:
        """Whether this, or an element of a list, is MIXED."""
        return self.kind is Kind.MIXED or any(part.contains_mixed for part in self.parts)

    @property
    def is_led_by_rows(self) -> bool:
        """Whether this has values for each row along its first axis, perhaps in segments."""
        return self.kind is Kind.ROWS and not (self.power or self.axis)

    @property
    def is_row_wise(self) -> bool:
        """Whether this has one block for each row along its first axis, or no row changes it."""
        return self.is_plain or (self.is_led_by_rows and self.parts in ((), DRAWN))

    @property
    def is_mean(self) -> bool:
        """Whether the mean over replicas, weighted by their rows, is one device's value."""
        return self.is_plain or (self.kind is Kind.SUMMED and self.power == -1)

    @property
    def is_sum(self) -> bool:
        """Whether the sum over replicas is one device's value."""
        is_size = self.kind is Kind.FREE and self.power == 1
        return is_size or self.is_zero or (self.kind is Kind.SUMMED and self.power == 0)


#: The classes of several tensors, and a rule: from an operation and the classes of its inputs, the
#: class of all of its outputs, or a list with that of each.
Values = Sequence[Dependence]
Rule = Callable[[Any, Values], Dependence | list[Dependence]]

FREE = Dependence(Kind.FREE)
ZERO = Dependence(Kind.FREE, factor=0)
MIXED = Dependence(Kind.MIXED)
UNKNOWN = Dependence(Kind.UNKNOWN)

#: `parts` of what `tf.random` draws with a state for each operation. Such numbers are documented to
#: differ from those of one device, so it does not matter which of them a row gets.
DRAWN = (UNKNOWN,)


def rows(axis: int = 0, factor: int | None = 1, power: int = 0) -> Dependence:
    """Returns the class of a tensor with one block of `factor` entries per row along an axis."""
    return Dependence(Kind.ROWS, power, axis, factor)


def summed(power: int) -> Dependence:
    """Returns the class of a sum over rows times a power of their number."""
    return Dependence(Kind.SUMMED, power)


def size(factor: int | None, power: int = 0) -> Dependence:
    """Returns the class of an integer: a factor times a power of the number of rows."""
    return Dependence(Kind.FREE, power, factor=factor)


def worst(values: Sequence[Dependence]) -> Dependence | None:
    """Returns MIXED or UNKNOWN if one of several classes is, or is not that of plain numbers."""
    kinds = {value.kind for value in values}
    if Kind.MIXED in kinds:
        return MIXED
    return None if kinds <= {Kind.FREE, Kind.ROWS, Kind.SUMMED} else UNKNOWN


def given_plain(rule: Rule, *places: int) -> Rule:
    """Returns a rule for operations of which some inputs must not depend on the rows.

    Args:
        rule: The rule if they do not.
        *places: Places of these inputs, which are axes, sizes, or places of entries.
    """

    def checked(op: Any, values: Values) -> Dependence | list[Dependence]:
        given = [values[place] for place in places if place < len(values)]
        if all(value.is_plain for value in given):
            return rule(op, values)
        return worst(values) or UNKNOWN

    return checked


def with_power(value: Dependence, change: int) -> Dependence:
    """Returns the class of a value times a power of the number of rows."""
    return replace(value, power=value.power + change) if change else value


def without_factor(value: Dependence) -> Dependence:
    """Returns a class without the integer that a FREE value is known to be, unless that is 0."""
    return value if value.is_zero or value.kind is not Kind.FREE else size(None, value.power)


def elementwise(tensors: Sequence[Any], values: Sequence[Dependence], out: Any) -> Dependence:
    """Returns the class of a function of the elements of tensors, after broadcasting.

    Args:
        tensors: The operands.
        values: Their classes.
        out: The result.
    """
    if (bad := worst(values)) is not None:
        return bad
    if all(value.is_plain for value in values):
        return FREE
    kinds = {value.kind for value in values}
    if Kind.SUMMED in kinds:
        return MIXED
    if Kind.ROWS not in kinds:
        return UNKNOWN  # a function of the number of rows alone
    if any(value.power and not value.is_zero for value in values):
        return MIXED
    return aligned(tensors, values, out)


def aligned(tensors: Sequence[Any], values: Sequence[Dependence], out: Any) -> Dependence:
    """Returns ROWS if all operands with rows have them along the same axis of the result."""
    axes = set()
    for tensor, value in zip(tensors, values, strict=True):
        if value.kind is Kind.ROWS:
            if tensor.shape.rank is None or out.shape.rank is None:
                return UNKNOWN
            axes.add(value.axis - tensor.shape.rank)
    if len(axes) > 1:
        return MIXED  # all pairs of rows
    axis = axes.pop()
    for tensor, value in zip(tensors, values, strict=True):
        if value.kind is not Kind.ROWS and tensor.shape.rank is None:
            return UNKNOWN
        is_free = value.kind is not Kind.ROWS and -axis <= tensor.shape.rank
        if is_free and tensor.shape[axis] != 1:
            return UNKNOWN  # perhaps a fixed number of rows
    return beside_each_other(values, axis + out.shape.rank)


def beside_each_other(values: Iterable[Dependence], axis: int = 0, power: int = 0) -> Dependence:
    """Returns the class of a tensor with entries for the same rows as those with the class ROWS.

    Args:
        values: Classes of the operands.
        axis: The axis of the rows in the result.
        power: The power of their number.
    """
    of_rows = [value for value in values if value.kind is Kind.ROWS]
    factors = {value.factor for value in of_rows} - {None}
    segments = {value.parts for value in of_rows if value.parts != DRAWN} or {DRAWN}
    if len(factors) > 1 or len(segments) > 1:
        return UNKNOWN
    result = rows(axis, factors.pop() if factors else None, power)
    return replace(result, parts=segments.pop())


def added(tensors: Sequence[Any], values: Sequence[Dependence], out: Any) -> Dependence:
    """Returns the class of a sum, a difference, or a choice that does not depend on the rows."""
    if (bad := worst(values)) is not None:
        return bad
    pairs = [(t, v) for t, v in zip(tensors, values, strict=True) if not v.is_zero]
    if not pairs:
        return ZERO
    kinds = {value.kind for _, value in pairs}
    if Kind.ROWS in kinds:
        if Kind.SUMMED in kinds or len({value.power for _, value in pairs}) > 1:
            return MIXED
        total = aligned(tensors, values, out)
        return with_power(total, pairs[0][1].power) if total.kind is Kind.ROWS else total
    # What no row changes is the mean of itself: c B^p is the sum over rows of c B^(p - 1).
    powers = {v.power - (v.kind is Kind.FREE) for _, v in pairs}
    if len(powers) > 1:
        return MIXED if Kind.SUMMED in kinds else UNKNOWN
    if Kind.SUMMED in kinds:
        return summed(powers.pop())
    return size(pairs[0][1].factor if len(pairs) == 1 else None, powers.pop() + 1)


def multiplied(tensors: Sequence[Any], values: Sequence[Dependence], out: Any) -> Dependence:
    """Returns the class of a product of two tensors, element by element."""
    if (bad := worst(values)) is not None:
        return bad
    if any(value.is_zero for value in values) and not any(v.kind is Kind.ROWS for v in values):
        return ZERO
    kinds = [value.kind for value in values]
    power = sum(value.power for value in values)
    if Kind.SUMMED in kinds:
        return summed(power) if Kind.FREE in kinds else MIXED
    if Kind.ROWS in kinds:
        product = aligned(tensors, values, out)
        return with_power(product, power) if product.kind is Kind.ROWS else product
    a, b = (value.factor for value in values)
    return size(None if a is None or b is None else a * b, power)


def divided(tensors: Sequence[Any], values: Sequence[Dependence], out: Any) -> Dependence:
    """Returns the class of a quotient, element by element."""
    if (bad := worst(values)) is not None:
        return bad
    numerator, denominator = values
    if denominator.kind is Kind.SUMMED:
        return MIXED
    if denominator.kind is Kind.ROWS and numerator.kind is Kind.SUMMED:
        return MIXED
    inverse = replace(denominator, power=-denominator.power)
    if denominator.kind is Kind.FREE:
        inverse = size(1 if denominator.factor == 1 else None, -denominator.power)
    return multiplied(tensors, [numerator, inverse], out)


def joined(one: Dependence, other: Dependence) -> Dependence:
    """Returns the class of a tensor that is the one or the other, whatever the rows are."""
    if one == other:
        return one
    if (bad := worst([one, other])) is not None and {one.kind, other.kind} != {Kind.LIST}:
        return bad
    if one.kind is Kind.LIST and other.kind is Kind.LIST:
        if one.power != other.power:
            return UNKNOWN
        parts = one.parts + other.parts
        return Dependence(
            Kind.LIST,
            one.power,
            factor=one.factor if one.factor == other.factor else None,
            parts=(joined(parts[0], parts[-1]),) if parts else (),
        )
    if one.kind is Kind.FREE and other.kind is Kind.FREE:
        return size(None, one.power) if one.power == other.power else UNKNOWN
    if one.kind is Kind.ROWS and other.kind is Kind.ROWS:
        is_alike = (one.axis, one.power, one.parts) == (other.axis, other.power, other.parts)
        return replace(one, factor=None) if is_alike else UNKNOWN
    if Kind.ROWS not in (one.kind, other.kind):
        scalar = tf.TensorSpec([])
        return added([scalar, scalar], [one, other], scalar)
    return UNKNOWN
