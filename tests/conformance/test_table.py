"""The table says what came out, no better and no worse."""

from __future__ import annotations

import json
import math

import pytest

from tests.conformance import standing, table
from tests.conformance.verdicts import KERAS, Question, Verdict

VERDICTS = {
    Question("auc", KERAS, 2): Verdict("crash", math.inf, ("Error: no",)),
    Question("auc", "towers", 2): Verdict("exact"),
    Question("auc", "towers", 3): Verdict("wrong", 0.25, ("weight 0 kernel: off by 0.25",)),
    Question("accumulate", KERAS, 2): Verdict("absent"),
    Question("accumulate", "towers", 2): Verdict("exact"),
    Question("accumulate-circle", KERAS, 2): Verdict("exact"),
    Question("accumulate-circle", "towers", 2): Verdict("refused", math.inf),
}


def test_counts_leave_out_what_cannot_be_asked() -> None:
    assert table.counts(VERDICTS) == "plain Keras: 1 of 2, tfdist towers: 1 of 3 and 1 refused"


def test_the_worst_number_of_replicas_counts() -> None:
    lines = table.markdown(VERDICTS).splitlines()
    assert lines[-3:] == [
        "| The area under a curve (`AUC`) | crash | wrong (0.2) |",
        "| The trainer's `accumulate`: a global batch worked off in rounds "
        "| no such option | exact |",
        "| The trainer's `accumulate` with a loss that compares rows with each other "
        "| exact | refused |",
    ]


def test_only_what_is_between_the_marks_is_replaced() -> None:
    text = "<!-- other:end -->\n<!-- name:begin -->\n{}\n<!-- name:end -->\nafter\n"
    assert table.replaced(text.format("old"), "name", "new") == text.format("new")
    with pytest.raises(ValueError, match="no place"):
        table.replaced(text, "another", "new")


def test_what_is_not_asked_stays_as_it_stands() -> None:
    text = "<!-- name:begin -->\n{}\n<!-- name:end -->\n"
    asked = {q: v for q, v in VERDICTS.items() if q.num_replicas == 2}
    some = {q: v for q, v in asked.items() if q.engine == "towers" and q.case != "auc"}
    others = {q: v for q, v in asked.items() if q not in some}
    engines = (KERAS, "towers")
    first = table.replaced(text, "name", table.markdown(others))
    both = standing.joined(first, "name", engines, some)
    written, wanted = (table.markdown(verdicts).splitlines() for verdicts in (both, asked))
    assert sorted(written) == sorted(wanted)
    assert standing.joined(text.format(""), "name", engines, some) == some
    with pytest.raises(ValueError, match="made over 2 replicas"):
        standing.joined(first, "name", engines, VERDICTS)


def test_records_are_json() -> None:
    first = json.loads(json.dumps(table.records(VERDICTS)))[0]
    assert first["case"] == "auc"
    assert first["largest"] is None
