"""Which tests run which lines of the product code, and how long they take."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

#: Tests that `--measure` runs: those of the folders above, and those that use them the most.
TESTS = ["pipelines", "groups", "step", "strategies", "loops", "custom_steps", "conformance"]
#: Tests for one mutant take at most so many seconds, as measured without it.
_BUDGET = 60.0
#: Coverage of test processes and of those that tests start. Their context is the running test.
_COVERAGE = """[run]
source = tfdist, pipelines
parallel = True
sigterm = {sigterm}
patch = _exit
data_file = {work}/coverage
context = ${{PYTEST_CURRENT_TEST-}}
"""


def measure(work: Path, tests: Sequence[str]) -> int:
    """Runs tests of `make test` with coverage, and stores coverage and times in a folder."""
    own, started = work / "coverage.ini", work / "coverage-started.ini"
    own.write_text(_COVERAGE.format(work=work, sigterm=False))
    # Processes that tests start are often terminated. Tests also send signals to this process.
    started.write_text(_COVERAGE.format(work=work, sigterm=True))
    os.environ["COVERAGE_PROCESS_START"] = str(started)  # read by processes that start from now on
    flags = ["--cov", f"--cov-config={own}", "--cov-context=test", "--cov-report="]
    flags += [f"--junitxml={work}/times.xml", "-o", "junit_family=xunit1"]
    flags += ["-q", "-p", "no:cacheprovider", "-m", "not check and not long"]
    return pytest.main([*(f"tests/{name}" for name in tests), *flags])


class TestsByLine:
    """Which tests run which lines, and how long they take without a mutant."""

    def __init__(self, work: Path) -> None:
        from coverage import CoverageData

        self._data = CoverageData(str(work / "coverage"))
        self._data.read()
        cases = ElementTree.parse(work / "times.xml").iter("testcase")
        self._seconds = {
            f"{case.get('file')}::{case.get('name')}": float(case.get("time", 0)) for case in cases
        }

    def reaching(self, file: Path, first: int, last: int) -> tuple[list[str], float]:
        """Returns the tests that run one of these lines, fastest first, and their seconds."""
        by_line = self._data.contexts_by_lineno(str(file))
        reached = {c for line in range(first, last + 1) for c in by_line.get(line, ())}
        if "" in reached:  # at import
            reached = {context for contexts in by_line.values() for context in contexts}
        tests = {context.rpartition("|")[0] or context.rpartition(" (")[0] for context in reached}
        chosen, total = [], 0.0
        for test in sorted(tests & self._seconds.keys(), key=self._seconds.__getitem__):
            chosen.append(test)
            total += self._seconds[test]
            if total > _BUDGET:
                break
        return chosen, total
