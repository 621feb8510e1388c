"""Reference results, computed once and shared by the processes of pytest-xdist."""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import engines, results

#: Computes a kind of references of a case, or reads what another process computed.
Stored = Callable[[str, Callable[[str], Any], str], Any]


@pytest.fixture(scope="session")
def references(stored: Stored) -> Callable[[str], engines.References]:
    """Returns a function from the name of a case to all its references."""
    return functools.cache(lambda name: stored("references", engines.references, name))


@pytest.fixture(scope="session")
def expected(request: pytest.FixtureRequest, stored: Stored) -> Callable[[str], results.Result]:
    """Returns a function from the name of a case to its results with plain Keras on one device.

    If a test of this run compares variants of the rows, too, they are computed together.
    """
    if any("references" in getattr(item, "fixturenames", ()) for item in request.session.items):
        references = request.getfixturevalue("references")
        return lambda name: references(name).expected
    return functools.cache(lambda name: stored("expected", engines.expected, name))


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """Returns a function that computes something of a case unless a process of this run did."""
    own = tmp_path_factory.getbasetemp()  # inside a folder that all processes of this run share
    folder = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    if kept := os.environ.get("TFDIST_TEST_REFERENCES"):
        folder = Path(kept)

    def known(kind: str, compute: Callable[[str], Any], name: str) -> Any:
        file = folder / f"{name}.{kind}"
        if not file.exists():
            written = Path(f"{file}.{os.getpid()}")
            written.write_bytes(pickle.dumps(compute(name)))
            written.replace(file)  # atomic: another process may read or write the same file
        return pickle.loads(file.read_bytes())

    return known
