"""A pytest plugin that records the outcomes of Keras's tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from tests.studies.keras_suite.redirect import Redirect
from tfdist.errors import TfdistError

PASSED, FAILED, NOT_APPLICABLE = "passed", "failed", "not applicable"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of one test.

    Attributes:
        status: `PASSED`, `FAILED` or `NOT_APPLICABLE`.
        reason: Why it did not pass.
    """

    status: str
    reason: str = ""


class Recorder:
    """A pytest plugin that runs tests through a Trainer and records their outcomes.

    Args:
        redirect: Replaces the methods of models; None to keep those of Keras.
    """

    def __init__(self, redirect: Redirect | None) -> None:
        self._through = redirect
        self.outcomes: dict[str, Outcome] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Runs the body of a test with the methods replaced."""
        self._calls = self._through.calls if self._through else 0
        with self._through.entered() if self._through else nullcontext():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Iterator[None]:
        """Records the outcome of the test's body, or of a set-up that failed."""
        report = yield
        if call.when == "call" or not report.passed:
            self.outcomes.setdefault(item.nodeid, self._outcome(report, call))
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Records a file that cannot be imported."""
        if report.failed:
            reason = str(report.longrepr).strip().splitlines()[-1]
            self.outcomes[report.nodeid] = Outcome(NOT_APPLICABLE, f"cannot be read: {reason}")

    def _outcome(self, report: pytest.TestReport, call: pytest.CallInfo[Any]) -> Outcome:
        if report.skipped:
            return Outcome(NOT_APPLICABLE, f"skips itself: {_words(call)}")
        if report.failed:
            return Outcome(FAILED, _words(call))
        if self._through and self._through.calls == self._calls:
            return Outcome(NOT_APPLICABLE, "does not call fit, evaluate or predict")
        return Outcome(PASSED)


def _words(call: pytest.CallInfo[Any]) -> str:
    """Returns the error of a test in one line."""
    error = call.excinfo.value if call.excinfo else None
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    kind = "refused" if isinstance(error, TfdistError) else type(error).__name__
    return f"{kind}: {' '.join(lines[:3])[:300]}"
