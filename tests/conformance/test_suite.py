"""Tests of the suite itself: its tolerance is fair, no case is blind, and none is forgotten."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.conformance import engines, results, selection
from tests.conformance.cases import CASES
from tests.conformance.engines import References
from tests.conformance.layouts import LAYOUTS


@pytest.fixture(params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    """The name of every case."""
    return request.param


@pytest.fixture
def answers(name: str, references: Callable[[str], References]) -> References:
    """What plain Keras makes of that."""
    return references(name)


def test_reference_is_finite(answers: References) -> None:
    """The right answer is made of numbers: NaN would equal any other NaN."""
    right = answers.right
    for values in (right.weights, right.optimizer, right.history, right.evaluation):
        assert all(np.all(np.isfinite(value)) for value in values.values())


def test_order_of_rows_is_tolerated(name: str, answers: References) -> None:
    """Rounding in another order of summing stays within the tolerance."""
    if CASES[name].is_random:
        pytest.skip("random numbers belong to places in the batch: other rows get them")
    differences = results.compare(answers.permuted, answers.right, CASES[name])
    assert not differences, "\n".join(map(str, differences))


def test_lost_rows_are_seen(name: str, answers: References) -> None:
    """Training without half of each batch is far outside of the tolerance."""
    assert _far_off(answers.half_lost, answers, name, "weight")


def test_rows_lost_in_evaluation_are_seen(name: str, answers: References) -> None:
    """Evaluation without half of each batch is far outside of the tolerance."""
    assert _far_off(answers.half_evaluated, answers, name, "evaluation")


def test_selection_names_cases_and_strategies() -> None:
    tables = (selection.FURTHER, selection.FEW, selection.GATE, selection.GATE_FURTHER)
    assert not {name for table in tables for names in table.values() for name in names} - {*CASES}
    assert not {*selection.FEW, *selection.GATE} - {*engines.STRATEGIES, *LAYOUTS}


def _far_off(
    result: results.Result, answers: References, name: str, what: str
) -> list[results.Difference]:
    differences = results.compare(result, answers.right, CASES[name])
    return [d for d in differences if d.what.startswith(what) and d.times > 10.0]
