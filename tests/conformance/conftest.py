"""Reference results, computed once and shared by the processes of pytest-xdist."""

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
    """Returns a function from the name of a case to its results with plain Keras on one device."""
    own = tmp_path_factory.getbasetemp()  # inside a folder that all processes of this run share
    folder = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    if kept := os.environ.get("TFDIST_TEST_REFERENCES"):
        folder = Path(kept)

    @functools.cache
    def known(name: str) -> engines.References:
        file = folder / f"{name}.references"
        if not file.exists():
            written = Path(f"{file}.{os.getpid()}")
            written.write_bytes(pickle.dumps(engines.references(name)))
            written.replace(file)  # atomic: another process may read or write the same file
        return pickle.loads(file.read_bytes())

    return known
