"""The result of one environment check."""

from __future__ import annotations

from typing import Literal, NamedTuple

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
