"""The contract across processes: all workers end with bitwise identical, correct weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.conformance import engines, results, selection
from tests.conformance.cases import CASES
from tests.conformance.layouts import LAYOUTS, Group, Layout
from tfdist.errors import TfdistError

# All layouts with the same processes run in one pytest-xdist process, which starts these once.
# Neighboring groups go through the cases in opposite order, so that two processes do not compute
# the same references.
GROUPS: dict[str, list[tuple[str, int, Layout]]] = {}
for strategy, layouts in LAYOUTS.items():
    for number, layout in enumerate(layouts):
        GROUPS.setdefault(layout.processes, []).append((strategy, number, layout))
PARAMETERS = [
    pytest.param(
        layout, name,
        marks=[pytest.mark.xdist_group(processes), *selection.marks(name, strategy, number)],
        id=f"{layout}-{name}",
    )
    for turn, (processes, members) in enumerate(GROUPS.items())
    for strategy, number, layout in members
    for name in list(CASES)[:: -1 if turn % 2 else 1]
]  # fmt: skip

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def group_of() -> Iterator[Callable[[Layout], Group]]:
    """Returns a function that starts the processes of a layout and stops those before."""
    running: list[Group] = []

    def get(layout: Layout) -> Group:
        if not running or running[0].layout.processes != layout.processes:
            while running:
                running.pop().stop()
            running.append(Group(layout))
        return running[0]

    yield get
    while running:
        running.pop().stop()


@pytest.mark.parametrize(("layout", "name"), PARAMETERS)
def test_equals_one_device_on_every_worker(
    layout: Layout,
    name: str,
    group_of: Callable[[Layout], Group],
    expected: Callable[[str], results.Result],
) -> None:
    case, group = CASES[name], group_of(layout)
    try:
        result = group.train(layout, name)
    except TfdistError:
        if not engines.may_refuse(case, layout.strategy):
            raise
        return
    differences = results.compare(result, expected(name), case)
    assert not differences, "\n".join(map(str, differences))
