"""A single process is a cluster of one worker, with all of its devices."""

from __future__ import annotations

import pytest

from tests.conformance import engines, results
from tests.conformance.cases import CASES
from tests.conformance.layouts import Group, Layout

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("via", ["", "processes"])
def test_single_worker_matches_one_device(via: str) -> None:
    layout = Layout("multi_worker", 1, num_devices=2, via=via)
    with Group(layout) as group:
        for name in ("uneven-batches", "embedding"):
            expected = engines.expected(name)
            differences = results.compare(group.train(layout, name), expected, CASES[name])
            assert not differences, "\n".join(map(str, differences))
