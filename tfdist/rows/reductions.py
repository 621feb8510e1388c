"""How the values of replicas combine: as a mean, as a sum, or not at all.

The static analysis of a traced graph (`row_analysis.py`) tells how a value depends on the rows of a
batch; this module turns that into a reduction.
"""

from __future__ import annotations

import enum

import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.rows.analysis import RowAnalysis
from tfdist.rows.dependence import FREE, MIXED, UNKNOWN, Dependence, Kind
from tfdist.rows.traced import change_is_sum


class Reduction(enum.Enum):
    """How the values of replicas combine to the value of the global batch."""

    MEAN = "mean"  # weighted by rows; also for a value that does not depend on the rows
    SUM = "sum"
    SAME = "same"  # on every replica


class NotReducibleError(UnsupportedModelError):
    """A value is neither a mean nor a sum over rows, or is not known to be one.

    Args:
        reason: Names the value.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"{reason}, so replicas cannot compute it from their rows. Override compute_loss, "
            "which gets the full batch, or use one device."
        )
        self.reason = reason


def reduction_of(what: str, analysis: RowAnalysis, value: Dependence) -> Reduction:
    """Returns the reduction of the sum over the elements of a value.

    Args:
        what: Name of the value, for messages.
        analysis: The analysis that found its class.
        value: The class.

    Raises:
        NotReducibleError: It has none, or the analysis cannot tell.
    """
    if value.is_mean:
        return Reduction.MEAN
    if value.is_sum or (value.kind is Kind.ROWS and value.power == 0):
        return Reduction.SUM
    is_mixed = value.kind is Kind.MIXED or (value.kind in (Kind.ROWS, Kind.SUMMED) and value.power)
    raise not_reducible(what, analysis, MIXED if is_mixed else UNKNOWN)


def reduction_of_change(
    what: str, analysis: RowAnalysis, start: tf.Tensor | None, new: tf.Tensor
) -> Reduction:
    """Returns the reduction of a variable's change.

    Args:
        what: Name of the change, for messages.
        analysis: Analysis of the graph.
        start: The variable's value before the change; None if that is not known.
        new: Its value after it.

    Raises:
        NotReducibleError: It has none, or the analysis cannot tell.
    """
    if analysis.of(new).is_mean:
        return Reduction.MEAN
    if (found := change_is_sum(analysis, start, new)) is FREE:
        return Reduction.SUM
    raise not_reducible(what, analysis, found)


def not_reducible(what: str, analysis: RowAnalysis, found: Dependence) -> NotReducibleError:
    """Returns the error about a value whose class is MIXED or UNKNOWN."""
    if found is MIXED or not analysis.unknown:
        return NotReducibleError(f"{what} is neither a mean nor a sum over rows")
    return NotReducibleError(f"{what} {unknown_operations(analysis)}")


def unknown_operations(analysis: RowAnalysis) -> str:
    """Returns the operations that an analysis could not classify, as a predicate."""
    names = " and ".join(dict.fromkeys(analysis.unknown))
    return f"uses operations that the row analysis cannot follow ({names})"
