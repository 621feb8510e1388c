"""The right answers, worked out once for all processes that pytest-xdist runs the tests in."""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conformance import engines


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], engines.References]:
    """Returns what plain Keras on one device makes of a case, by its name."""
    own = tmp_path_factory.getbasetemp()  # within one that all processes of this run share
    folder = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    @functools.cache
    def known(name: str) -> engines.References:
        file = folder / f"{name}.references"
        if not file.exists():
            written = Path(f"{file}.{os.getpid()}")
            written.write_bytes(pickle.dumps(engines.references(name)))
            written.replace(file)  # another process may read, or write the same
        return pickle.loads(file.read_bytes())

    return known
