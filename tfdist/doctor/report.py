"""The report, as tables for people or as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

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
    table = Table(show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for group, checks in groups.items():
        table.add_section()
        table.add_row(group, "", "")
        for check in checks:
            style = _STYLES[check.state]
            table.add_row(f"  {check.name}", f"[{style}]{check.state}[/]", _escaped(check))
    Console(highlight=False).print(table)


def _escaped(check: Check) -> str:
    return escape(f"{check.value}\ncure: {check.cure}" if check.cure else check.value)
