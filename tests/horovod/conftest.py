"""A pool of two ranks, started once, that runs the programs of all tests in this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.layouts import AnsweringPool, Layout, values_of

Run = Callable[[str], list[Any]]


def _programs() -> Callable[[str], Any]:
    """Runs in a rank: returns a function that runs a program."""
    import tests  # noqa: F401 - silences TensorFlow
    import tfdist.horovod as hvd

    hvd.init()
    from tests.horovod.programs import PROGRAMS

    return lambda program: PROGRAMS[program]()


@pytest.fixture(scope="module")  # idle ranks use CPU time
def run() -> Iterator[Run]:
    """Returns a function that runs a program of `tests.horovod.programs` on each rank."""
    with AnsweringPool(Layout("horovod", 2, via="mpirun"), _programs) as pool:
        yield lambda program: values_of(pool.ask(program))


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist collects groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group("horovod"))
            item.add_marker(pytest.mark.processes)
