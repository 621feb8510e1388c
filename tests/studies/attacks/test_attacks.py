"""`python -m tests.studies.attacks`, with the attacks that no other test makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.studies.attacks import table
from tests.support.commands import needs_horovod


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize("strategy", ["multi_worker", pytest.param("horovod", marks=needs_horovod)])
def test_a_worker_that_does_something_else_is_reported(strategy: str) -> None:
    rows = list(table.of_workers(strategy))
    assert [row for row in rows if not row.passed] == []


@pytest.mark.check
@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("test_attack.py", "def test_a(): pass", (True, "1 of 1 tests passed")),
        (
            "test_attack.py",
            "def test_a(): assert False",
            (False, "0 of 1 tests passed, not test_a"),
        ),
        ("conftest.py", "import x_", (False, "pytest exited with 4 before it ran a test")),
    ],
    ids=["passes", "fails", "does not start"],
)
def test_outcome_is_that_of_the_last_run(
    file: str, text: str, expected: tuple[bool, str], tmp_path: Path
) -> None:
    report = tmp_path / "report.xml"
    report.write_text('<testsuite tests="9" failures="0" errors="0"/>')  # of an earlier run
    (tmp_path / "test_attack.py").touch()
    (tmp_path / file).write_text(text)
    assert table._outcome([str(tmp_path / "test_attack.py")], report) == expected
