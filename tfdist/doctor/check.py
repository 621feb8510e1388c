"""One line of the doctor's report."""

from __future__ import annotations

from typing import Literal, NamedTuple

#: `"missing"` is what a run can do without; `"wrong"` makes the command fail.
State = Literal["ok", "missing", "wrong"]


class Check(NamedTuple):
    """What was looked at and what was found.

    Attributes:
        name: What was looked at.
        value: What was found.
        state: How good that is.
        cure: The command, or the deed, that mends it; empty where nothing has to be.
    """

    name: str
    value: str
    state: State = "ok"
    cure: str = ""
