"""How the values of replicas combine: as a mean, as a sum, or not at all.

The static analysis of a traced graph (`row_analysis.py`) tells how a value depends on the rows of a
batch; this module turns that into a reduction.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Sequence

import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.step.row_analysis import RowAnalysis
from tfdist.step.row_dependence import FREE, MIXED, UNKNOWN, Dependence, Kind
from tfdist.step.traced_forward import change_is_sum

#: How what a replica computes can be combined: by the static analysis, by probes, or not at all.
DECISIONS: collections.Counter[str] = collections.Counter()


class Reduction(enum.Enum):
    """How the values of replicas combine to the value of the global batch."""

    MEAN = "mean"  # weighted by rows; also for a value that does not depend on the rows
    SUM = "sum"
    SAME = "same"  # on every replica


def reduction_of(value: Dependence) -> Reduction | Dependence:
    """Returns the reduction of the sum over the elements of a value, or MIXED or UNKNOWN."""
    if value.is_mean:
        return Reduction.MEAN
    if value.is_sum or (value.kind is Kind.ROWS and value.power == 0):
        return Reduction.SUM
    is_mixed = value.kind is Kind.MIXED or (value.kind in (Kind.ROWS, Kind.SUMMED) and value.power)
    return MIXED if is_mixed else UNKNOWN


def reduction_of_change(
    analysis: RowAnalysis, start: tf.Tensor | None, new: tf.Tensor
) -> Reduction | Dependence:
    """Returns the reduction of a variable's change, or MIXED or UNKNOWN.

    Args:
        analysis: Analysis of the graph.
        start: The variable's value before the change; None if that is not known.
        new: Its value after it.
    """
    value = analysis.of(new)
    if value.is_mean:
        return Reduction.MEAN
    change = change_is_sum(analysis, start, new)
    if change is FREE:
        return Reduction.SUM
    return MIXED if value.kind is Kind.MIXED and change is not UNKNOWN else UNKNOWN


def decided(what: str, found: Reduction | Dependence) -> Reduction | None:
    """Returns a reduction that the analysis found; None if it found none.

    Raises:
        UnsupportedModelError: The value is neither a mean nor a sum over rows.
    """
    if found is UNKNOWN:
        return None
    DECISIONS["analysis"] += 1
    if not isinstance(found, Reduction):
        raise not_reducible(what)
    return found


def worst_decision(found: Sequence[Dependence]) -> Dependence:
    """Returns MIXED if one of several decisions is, UNKNOWN if one is that, or else FREE."""
    return MIXED if MIXED in found else UNKNOWN if UNKNOWN in found else FREE


def not_reducible(what: str) -> UnsupportedModelError:
    """Returns the error about a value that replicas cannot compute from their rows."""
    return UnsupportedModelError(
        f"{what} is neither a mean nor a sum over rows, so replicas cannot compute it from their "
        "rows. Override compute_loss, which gets the full batch, or use one device."
    )
