"""All that the command can ask, by name: the cases of the contract, and the programs."""

from __future__ import annotations

from tests.conformance.cases import CASES
from tests.programs.programs import PROGRAMS
from tests.support.case import Case

ASKED: dict[str, Case] = {**CASES, **PROGRAMS}
