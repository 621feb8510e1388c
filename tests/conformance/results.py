"""Compares the results of two training runs with the function that `tfdist.tools.verify` uses."""

from __future__ import annotations

from tests.support.case import Case
from tfdist.tools.verify.results import TOLERANCE as TOLERANCE
from tfdist.tools.verify.results import Difference as Difference
from tfdist.tools.verify.results import Result as Result
from tfdist.tools.verify.results import collect as collect
from tfdist.tools.verify.results import differences


def compare(result: Result, reference: Result, case: Case) -> list[Difference]:
    """Returns the differences outside of the case's tolerance, the largest first."""
    return [d for d in differences(result, reference, case.tolerance) if d.times > 1.0]
