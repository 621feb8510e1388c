"""Reads a table back from a README, so that a column, or a cell, can be asked by itself."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from tests.conformance import table
from tests.conformance.asked import ASKED
from tests.conformance.verdicts import Question, Verdict


def joined(text: str, name: str, engines: Iterable[str], asked: table.Verdicts) -> table.Verdicts:
    """Returns what the table of that name says, with what has been asked now in its place.

    Args:
        text: Of the README.
        name: Of the table.
        engines: Those that a column may be of.
        asked: With as many replicas as the table, where there is one, or with the one that an
            engine can have.

    Raises:
        ValueError: The table was made with another number of replicas, or with several.
    """
    standing = re.search(rf"<!-- {name}:begin -->\n(.+?)<!-- {name}:end -->", text, re.DOTALL)
    if standing is None or not standing[1].strip():
        return asked
    caption, *lines = [line for line in standing[1].splitlines() if line]
    number, own = caption.rpartition(", over ")[2].split(" replicas.")[0], table.num_replicas(asked)
    if not number.isdecimal() or own not in ("1", number):
        raise ValueError(f"The table was made over {number} replicas: write all of it anew.")
    titles, _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    by_title = {table.title(engine): engine for engine in engines}
    cases = {case.feature: key for key, case in ASKED.items()}
    known = {
        (cases[feature], by_title[title]): (
            Question(cases[feature], by_title[title], int(number)),
            _verdict(cell),
        )
        for feature, *cells in rows
        if feature in cases
        for title, cell in zip(titles[1:], cells, strict=True)
        if cell
    }
    known |= {(q.case, q.engine): (q, verdict) for q, verdict in asked.items()}
    order = list(ASKED)
    return dict(sorted(known.values(), key=lambda pair: order.index(pair[0].case)))


def _verdict(cell: str) -> Verdict:
    """Returns what a cell says, as `table` writes it."""
    if cell == "no such option":
        return Verdict("absent")
    status, _, size = cell.partition(" ")
    if status == "wrong":
        return Verdict(status, float(size.strip("()")))
    return Verdict(status, 0.0 if status == "exact" else math.inf)
