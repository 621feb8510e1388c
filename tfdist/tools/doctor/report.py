"""The result of an environment check, and reports of all checks as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from rich.text import Text

from tfdist.console import tables

#: `"missing"`: something optional is not there; `"wrong"`: the check failed, and so does the
#: command.
State = Literal["ok", "missing", "wrong"]


class Check(NamedTuple):
    """The result of a check.

    Attributes:
        name: What was checked.
        value: The version, size or problem that was detected.
        state: Whether the check passed.
        fix: The command or action that fixes the problem; empty if there is none.
    """

    name: str
    value: str
    state: State = "ok"
    fix: str = ""


_STYLES: dict[State, str] = {"ok": "green", "missing": "yellow", "wrong": "red"}

Groups = Mapping[str, Sequence[Check]]


def healthy(groups: Groups) -> bool:
    """Returns whether no check failed."""
    return all(check.state != "wrong" for checks in groups.values() for check in checks)


def as_json(groups: Groups) -> str:
    """Returns the report as JSON: `{"healthy": ..., "groups": {name: [check, ...]}}`."""
    lines = {name: [check._asdict() for check in checks] for name, checks in groups.items()}
    return json.dumps({"healthy": healthy(groups), "groups": lines}, indent=2)


def show(groups: Groups) -> None:
    """Prints a table, with the fix below each check that did not pass."""
    tables.facts(
        *([(group, "", ""), *map(_row, checks)] for group, checks in groups.items()),
    )


def _row(check: Check) -> tuple[tables.Cell, ...]:
    state = Text(check.state, style=_STYLES[check.state])
    text = f"{check.value}\nfix: {check.fix}" if check.fix else check.value
    return f"  {check.name}", state, text
