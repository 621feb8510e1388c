"""The contract across processes: every worker ends with the weights of one device, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.conformance import engines, results, selection
from tests.conformance.cases import CASES
from tests.conformance.layouts import LAYOUTS, Group, Layout
from tfdist.errors import TfdistError

# Each layout in one process of pytest-xdist, which starts its group once. Two that run at a time
# begin at either end of the cases, so that no reference is worked out twice.
QUESTIONS = [
    pytest.param(
        layout, name,
        marks=[pytest.mark.xdist_group(str(layout)), *selection.marks(name, strategy, number)],
        id=f"{layout}-{name}",
    )
    for turn, (strategy, layouts) in enumerate(LAYOUTS.items())
    for number, layout in enumerate(layouts)
    for name in list(CASES)[:: -1 if turn % 2 else 1]
]  # fmt: skip

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def group_of() -> Iterator[Callable[[Layout], Group]]:
    """Returns the group of a layout, which runs until that of another is asked for."""
    running: list[Group] = []

    def get(layout: Layout) -> Group:
        if layout.needs_horovod:
            reason = "Horovod is not installed: make horovod"
            pytest.importorskip("horovod.tensorflow", reason=reason)
        if not running or running[0].layout != layout:
            while running:
                running.pop().stop()
            running.append(Group(layout))
        return running[0]

    yield get
    while running:
        running.pop().stop()


@pytest.mark.parametrize(("layout", "name"), QUESTIONS)
def test_equals_one_device_on_every_worker(
    layout: Layout,
    name: str,
    group_of: Callable[[Layout], Group],
    references: Callable[[str], engines.References],
) -> None:
    case, group = CASES[name], group_of(layout)
    try:
        result = group.train(name)
    except TfdistError:
        if not engines.may_refuse(case, layout.strategy):
            raise
        return
    differences = results.compare(result, references(name).right, case)
    assert not differences, "\n".join(map(str, differences))
