"""The partition of a chain into stages, compared with every other partition."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.strategies.pipeline.stages import balanced_cuts, cut_places


def largest_cost(costs: list[list[int]], places: tuple[int, ...] | list[int]) -> int:
    ends = itertools.pairwise([0, *places, len(costs[0])])
    return max(sum(own[begin:end]) for own, (begin, end) in zip(costs, ends, strict=True))


@given(first=st.lists(st.integers(0, 20), min_size=1, max_size=7), data=st.data())
def test_cut_is_optimal(first: list[int], data: st.DataObject) -> None:
    allowed = sorted(data.draw(st.sets(st.integers(1, max(1, len(first) - 1)))))
    allowed = [place for place in allowed if place < len(first)]
    num_runs = data.draw(st.integers(1, len(allowed) + 1))
    in_each = st.lists(st.integers(0, 20), min_size=len(first), max_size=len(first))
    costs = [first, *(data.draw(in_each) for _ in range(num_runs - 1))]
    result = balanced_cuts(costs, allowed)
    assert result == sorted(result)
    assert set(result) <= set(allowed)
    candidates = itertools.combinations(allowed, num_runs - 1)
    assert largest_cost(costs, result) == min(
        largest_cost(costs, candidate) for candidate in candidates
    )


def test_groups_are_not_cut() -> None:
    assert cut_places(6, [(1, 3), (3, 4)]) == [1, 5]
    assert cut_places(1, []) == []
    with pytest.raises(ValueError, match="3 runs need 2 cuts, of 1 places"):
        balanced_cuts([[1, 1, 1]] * 3, [2])
