"""Tests of the suite itself: its tolerance is fair, and no case is blind."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conformance import engines, results
from tests.conformance.cases import CASES

pytestmark = pytest.mark.parametrize("name", CASES)


def test_reference_is_finite(name: str) -> None:
    """The right answer is made of numbers: NaN would equal any other NaN."""
    answer = engines.reference(name)
    for values in (answer.weights, answer.history, answer.evaluation):
        assert all(np.all(np.isfinite(value)) for value in values.values())


def test_order_of_rows_is_tolerated(name: str) -> None:
    """Rounding in another order of summing stays within the tolerance."""
    differences = results.compare(engines.permuted(name), engines.reference(name), CASES[name])
    assert not differences, "\n".join(map(str, differences))


def test_lost_rows_are_seen(name: str) -> None:
    """Training without half of each batch is far outside of the tolerance."""
    assert _far_off(engines.half_lost(name), name, "weight")


def test_rows_lost_in_evaluation_are_seen(name: str) -> None:
    """Evaluation without half of each batch is far outside of the tolerance."""
    assert _far_off(engines.half_evaluated(name), name, "evaluation")


def _far_off(result: results.Result, name: str, what: str) -> list[results.Difference]:
    differences = results.compare(result, engines.reference(name), CASES[name])
    return [d for d in differences if d.what.startswith(what) and d.times > 10.0]
