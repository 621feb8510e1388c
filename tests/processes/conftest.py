"""Fixtures for tests of several processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hosts import Hosts, NotAllowedError, make_hosts


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Two network namespaces as hosts, connected by a virtual wire; skips if not permitted."""
    try:
        with make_hosts(tmp_path) as hosts:
            yield hosts
    except NotAllowedError as error:
        pytest.skip(f"no network namespaces here: {error}")
