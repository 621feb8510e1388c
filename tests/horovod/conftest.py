"""One group of two ranks, started once, that runs the programs of all tests here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.group import Group, Layout

Run = Callable[[str], list[Any]]


@pytest.fixture(scope="module")  # ranks that wait for work are busy asking for it
def run() -> Iterator[Run]:
    """Runs a program of `tests.horovod.programs`; returns what it returned, by rank."""
    pytest.importorskip("horovod.tensorflow", reason="Horovod is not installed: make horovod")
    with Group(Layout("horovod", 2, via="mpi"), worker="tests.horovod.worker") as group:

        def on_all_ranks(program: str) -> list[Any]:
            answers = group.ask(program)
            failed = [answer.error for answer in answers if answer.error]
            assert not failed, "\n".join(failed)
            return [answer.result for answer in answers]

        yield on_all_ranks


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group("horovod"))
            item.add_marker(pytest.mark.processes)
