"""All cases that the command can run, by name: those of the contract, and the programs."""

from __future__ import annotations

from tests.conformance.cases import CASES
from tests.programs.programs import PROGRAMS
from tests.support.case import Case

ALL_CASES: dict[str, Case] = {**CASES, **PROGRAMS}
