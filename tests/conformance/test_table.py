"""Tests of the compatibility table."""

from __future__ import annotations

import json
import math

import pytest

from tests.conformance import existing_table, table
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
