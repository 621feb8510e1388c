"""`python -m tests.attacks`, with the attacks that no other test makes."""

from __future__ import annotations

import pytest

from tests.attacks import table

pytestmark = [pytest.mark.processes, pytest.mark.long]


@pytest.mark.parametrize("strategy", ["multi_worker", "horovod"])
def test_a_worker_that_does_something_else_is_reported(strategy: str) -> None:
    if strategy == "horovod":
        pytest.importorskip("horovod.tensorflow", reason="Horovod is not installed: make horovod")
    rows = list(table.of_workers(strategy))
    assert [row for row in rows if not row.passed] == []
