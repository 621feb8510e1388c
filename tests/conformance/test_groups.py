"""The contract across processes: every worker ends with the weights of one device, to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance import engines, results
from tests.conformance.cases import CASES
from tests.conformance.layouts import LAYOUTS, Group
from tfdist.errors import TfdistError

# Each layout in one process of pytest-xdist, which starts its group once.
PARAMS = [
    pytest.param(layout, marks=pytest.mark.xdist_group(str(layout)), id=str(layout))
    for layouts in LAYOUTS.values()
    for layout in layouts
]

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", params=PARAMS)
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    if request.param.strategy == "horovod":
        pytest.importorskip("horovod.tensorflow", reason="Horovod is not installed: make horovod")
    with Group(request.param) as group:
        yield group


@pytest.mark.parametrize("name", CASES)
def test_equals_one_device_on_every_worker(name: str, group: Group) -> None:
    case = CASES[name]
    try:
        result = group.train(name)
    except TfdistError:
        if not case.may_refuse:
            raise
        return
    differences = results.compare(result, engines.reference(name), case)
    assert not differences, "\n".join(map(str, differences))
