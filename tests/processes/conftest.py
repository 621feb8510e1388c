"""What the tests of several processes share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hosts import Hosts, NotAllowedError, make_hosts


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts with nothing but a wire between them; skips where the machine forbids them."""
    try:
        with make_hosts(tmp_path) as hosts:
            yield hosts
    except NotAllowedError as error:
        pytest.skip(f"no network namespaces here: {error}")
