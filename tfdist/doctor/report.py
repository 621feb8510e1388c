"""The report, as tables for people or as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from rich.text import Text

from tfdist.console import tables
from tfdist.doctor.check import Check, State

_STYLES: dict[State, str] = {"ok": "green", "missing": "yellow", "wrong": "red"}

Groups = Mapping[str, Sequence[Check]]


def healthy(groups: Groups) -> bool:
    """Tells whether no line is red."""
    return all(check.state != "wrong" for checks in groups.values() for check in checks)


def as_json(groups: Groups) -> str:
    """Returns the report as JSON: `{"healthy": ..., "groups": {name: [line, ...]}}`."""
    lines = {name: [check._asdict() for check in checks] for name, checks in groups.items()}
    return json.dumps({"healthy": healthy(groups), "groups": lines}, indent=2)


def show(groups: Groups) -> None:
    """Prints a table; a line that is not green has the cure under it."""
    tables.facts(
        *([(group, "", ""), *map(_row, checks)] for group, checks in groups.items()),
    )


def _row(check: Check) -> tuple[tables.Cell, ...]:
    state = Text(check.state, style=_STYLES[check.state])
    found = f"{check.value}\ncure: {check.cure}" if check.cure else check.value
    return f"  {check.name}", state, found
