"""The suite itself: its cases, and its table."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest

from tests.conformance import engines, existing_table, results, selection, table
from tests.conformance.cases import CASES
from tests.conformance.engines import References
from tests.conformance.layouts import LAYOUTS, SECONDS
from tests.conformance.verdicts import KERAS, Question, Verdict, limit


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


def test_groups_report_their_time_outs() -> None:
    assert limit(Question("auc", "horovod", 2)) > SECONDS > limit(Question("auc", "mirrored", 2))


def _large_differences(
    result: results.Result, answers: References, name: str, what: str
) -> list[results.Difference]:
    differences = results.compare(result, answers.expected, CASES[name])
    return [d for d in differences if d.what.startswith(what) and d.times > 10.0]


VERDICTS = {
    Question("auc", KERAS, 2): Verdict("crash", math.inf, ("Error: no",)),
    Question("auc", "towers", 2): Verdict("exact"),
    Question("auc", "towers", 3): Verdict("wrong", 0.25, ("weight 0 kernel: off by 0.25",)),
    Question("accumulate", KERAS, 2): Verdict("absent"),
    Question("accumulate", "towers", 2): Verdict("exact"),
    Question("accumulate-circle", KERAS, 2): Verdict("exact"),
    Question("accumulate-circle", "towers", 2): Verdict("refused", math.inf),
}


def test_counts_exclude_absent_options() -> None:
    assert table.counts(VERDICTS) == "plain Keras: 1 of 2, tfdist towers: 1 of 3 and 1 refused"


def test_cell_shows_the_worst_number_of_replicas() -> None:
    lines = table.markdown(VERDICTS).splitlines()
    assert lines[-3:] == [
        "| The area under a curve (`AUC`) | crash | wrong (0.2) |",
        "| The trainer's `accumulate`: a global batch in several rounds | no such option | exact |",
        "| The trainer's `accumulate` with a loss that compares rows with each other "
        "| exact | refused |",
    ]


def test_replaces_only_the_text_between_markers() -> None:
    text = "<!-- other:end -->\n<!-- name:begin -->\n{}\n<!-- name:end -->\nafter\n"
    assert table.replaced(text.format("old"), "name", "new") == text.format("new")
    with pytest.raises(ValueError, match="no markers"):
        table.replaced(text, "another", "new")


def test_merge_keeps_existing_cells() -> None:
    text = "<!-- name:begin -->\n{}\n<!-- name:end -->\n"
    new = {q: v for q, v in VERDICTS.items() if q.num_replicas == 2}
    some = {q: v for q, v in new.items() if q.engine == "towers" and q.case != "auc"}
    others = {q: v for q, v in new.items() if q not in some}
    engines = (KERAS, "towers")
    first = table.replaced(text, "name", table.markdown(others))
    both = existing_table.merge(first, "name", engines, some)
    written, wanted = (table.markdown(verdicts).splitlines() for verdicts in (both, new))
    assert sorted(written) == sorted(wanted)
    assert existing_table.merge(text.format(""), "name", engines, some) == some
    with pytest.raises(ValueError, match="made over 2 replicas"):
        existing_table.merge(first, "name", engines, VERDICTS)


def test_answered_cells_are_read_from_an_existing_table() -> None:
    text = "<!-- name:begin -->\n{}\n<!-- name:end -->\n"
    some = [Question("auc", KERAS, 2), Question("accumulate", "towers", 2)]
    written = text.format(table.markdown({question: VERDICTS[question] for question in some}))
    answered = existing_table.answered(written, "name", (KERAS, "towers"))
    assert answered == {("auc", KERAS), ("accumulate", "towers")}
    assert not existing_table.answered(text.format(""), "name", (KERAS,))


def test_records_are_json() -> None:
    first = json.loads(json.dumps(table.records(VERDICTS)))[0]
    assert first["case"] == "auc"
    assert first["largest"] is None
