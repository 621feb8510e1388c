"""Tests of the suite itself: tolerances are wide enough, and every case detects lost rows.

`make conformance` runs them: each case takes three more trainings of plain Keras.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.conformance import engines, results, selection
from tests.conformance.cases import CASES
from tests.conformance.engines import References
from tests.conformance.layouts import LAYOUTS


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.long) for name in CASES])
def name(request: pytest.FixtureRequest) -> str:
    """The name of every case in turn."""
    return request.param


@pytest.fixture
def answers(name: str, references: Callable[[str], References]) -> References:
    """The results of plain Keras for the case."""
    return references(name)


def test_reference_is_finite(answers: References) -> None:
    """The reference contains no NaN, which `assert_equal` would consider equal to another NaN."""
    expected = answers.expected
    for values in (expected.weights, expected.optimizer, expected.history, expected.evaluation):
        assert all(np.all(np.isfinite(value)) for value in values.values())


def test_row_order_is_within_tolerance(name: str, answers: References) -> None:
    """Summing the rows in another order stays within the tolerance."""
    if CASES[name].is_random:
        pytest.skip("random numbers depend on the position of a row in its batch")
    differences = results.compare(answers.permuted, answers.expected, CASES[name])
    assert not differences, "\n".join(map(str, differences))


def test_detects_lost_training_rows(name: str, answers: References) -> None:
    """Training without half of each batch is far outside of the tolerance."""
    assert _large_differences(answers.half_lost, answers, name, "weight")


def test_detects_lost_evaluation_rows(name: str, answers: References) -> None:
    """Evaluating without half of each batch is far outside of the tolerance."""
    assert _large_differences(answers.half_evaluated, answers, name, "evaluation")


def test_selection_names_cases_and_strategies() -> None:
    tables = (
        *(selection.FURTHER, selection.FEW, selection.GATE, selection.GATE_FURTHER),
        {reason: names for reason, (_, names) in selection.FEEDING.items()},
        {"resized": selection.RESIZED},
    )
    assert not {name for table in tables for names in table.values() for name in names} - {*CASES}
    fed = {strategy for strategies, _ in selection.FEEDING.values() for strategy in strategies}
    assert not {*selection.FEW, *selection.GATE, *fed} - {*engines.STRATEGIES, *LAYOUTS}


def _large_differences(
    result: results.Result, answers: References, name: str, what: str
) -> list[results.Difference]:
    differences = results.compare(result, answers.expected, CASES[name])
    return [d for d in differences if d.what.startswith(what) and d.times > 10.0]
