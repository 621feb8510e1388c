"""The contract across processes: every worker ends with the weights of one device, to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.conformance import engines, results
from tests.conformance.cases import CASES
from tests.conformance.group import Group, Layout

LAYOUTS = [
    Layout("horovod", 2, via="mpi"),
    Layout("horovod", 3, via="gloo"),
    Layout("multi_worker", 2),
    Layout("multi_worker", 2, num_devices=2),
    Layout("multi_worker", 3),
]


def _params() -> list:
    """The cases of a layout in one process of pytest-xdist, which starts the group once."""
    return [
        pytest.param(layout, marks=pytest.mark.xdist_group(str(layout)), id=str(layout))
        for layout in LAYOUTS
    ]


@pytest.fixture(scope="module", params=_params())
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    with Group(request.param) as group:
        yield group


@pytest.mark.parametrize("name", CASES)
def test_equals_one_device_on_every_worker(name: str, group: Group) -> None:
    case = CASES[name]
    answers = group.ask(name)
    if case.may_refuse and all(answer.declined for answer in answers):
        return
    assert not any(answer.error for answer in answers), "\n".join(a.error for a in answers)
    first, *others = [answer.result for answer in answers]
    for other in others:
        for path, weight in first.weights.items():
            np.testing.assert_array_equal(other.weights[path], weight, err_msg=path)
        np.testing.assert_equal(other.history, first.history)
        np.testing.assert_equal(other.evaluation, first.evaluation)
    differences = results.compare(first, engines.reference(name), case)
    assert not differences, "\n".join(map(str, differences))
