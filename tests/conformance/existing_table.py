"""Reads an existing table from a README, so that one column or cell can be updated by itself."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from tests.conformance import table
from tests.conformance.all_cases import ALL_CASES
from tests.conformance.verdicts import Question, Verdict


def merge(text: str, name: str, engines: Iterable[str], new: table.Verdicts) -> table.Verdicts:
    """Returns the verdicts of an existing table, updated with new ones.

    Args:
        text: Text of the README.
        name: Name of the table.
        engines: Engines that the columns may belong to.
        new: Verdicts, with the same number of replicas as the table, or with the only one that an
            engine supports.

    Raises:
        ValueError: If the table was made with another number of replicas, or with several.
    """
    number, known = _read(text, name, engines)
    if not known:
        return new
    if not number.isdecimal() or table.num_replicas(new) not in ("1", number):
        raise ValueError(f"The table was made over {number} replicas. Rerun all columns.")
    known |= {(q.case, q.engine): (q, verdict) for q, verdict in new.items()}
    order = list(ALL_CASES)
    return dict(sorted(known.values(), key=lambda pair: order.index(pair[0].case)))


def answered(text: str, name: str, engines: Iterable[str]) -> set[tuple[str, str]]:
    """Returns the cases and engines that have a cell in an existing table.

    Args:
        text: Text of the README.
        name: Name of the table.
        engines: Engines that the columns may belong to.
    """
    return set(_read(text, name, engines)[1])


def _read(
    text: str, name: str, engines: Iterable[str]
) -> tuple[str, dict[tuple[str, str], tuple[Question, Verdict]]]:
    """Returns the number of replicas of an existing table, and its verdicts by case and engine."""
    result = re.search(rf"<!-- {name}:begin -->\n(.+?)<!-- {name}:end -->", text, re.DOTALL)
    if result is None or not result[1].strip():
        return "", {}
    caption, *lines = [line for line in result[1].splitlines() if line]
    number = caption.rpartition(", over ")[2].split(" replicas.")[0]
    titles, _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    by_title = {table.title(engine): engine for engine in engines}
    cases = {case.feature: key for key, case in ALL_CASES.items()}
    num_replicas = int(number) if number.isdecimal() else 0
    return number, {
        (cases[feature], by_title[title]): (
            Question(cases[feature], by_title[title], num_replicas),
            _verdict(cell),
        )
        for feature, *cells in rows
        if feature in cases
        for title, cell in zip(titles[1:], cells, strict=True)
        if cell
    }


def _verdict(cell: str) -> Verdict:
    """Parses a cell that `table` wrote."""
    if cell == "no such option":
        return Verdict("absent")
    status, _, size = cell.partition(" ")
    if status == "wrong":
        return Verdict(status, float(size.strip("()")))
    return Verdict(status, 0.0 if status == "exact" else math.inf)
