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


# ---- known outcomes ----


_OWN_SCOPE = (
    "the test builds and trains in a tf.distribute scope, whose mirrored variables a Trainer's "
    "replicas do not use; the Trainer rebuilds the model without them"
)

_TRACED_BY_REPLICA = (
    "the test counts the calls of its train_step: a Trainer traces it once for each replica, after "
    "two dry runs that create its variables and infer its reductions"
)

#: Part of the test's name, part of its error, and the difference in a Trainer that explains it.
REASONS: list[tuple[str, str, str]] = [
    ("test_swap_ema_weights_with_tf_distribute", "__array__", _OWN_SCOPE),
    ("test_retracing", "not less than or equal to 2", _TRACED_BY_REPLICA),
]


def reason_of(test: str, error: str) -> str | None:
    """Returns why a test fails, or None if the reason is unknown."""
    result = (why for name, words, why in REASONS if name in test and words in error)
    return next(result, None)
