"""The pipeline bubble, compared with a simulated schedule, and the partition into stages."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.strategies.pipeline.schedule import (
    micro_batches_in_memory,
    planned_speed_up,
    speed_up,
    turns,
)
from tfdist.strategies.pipeline.stages import balanced_cuts, cut_places


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(1, 3), (2, 1), (2, 8), (4, 16)])
def test_utilization_matches_a_simulated_schedule(num_stages: int, num_micro_batches: int) -> None:
    ends: dict[tuple[int, int], int] = {}
    for micro_batch in range(num_micro_batches):
        for stage in range(num_stages):
            before = (stage - 1, micro_batch), (stage, micro_batch - 1)
            ends[stage, micro_batch] = 1 + max(ends.get(turn, 0) for turn in before)
    length = max(ends.values())
    shares = [1 / num_stages] * num_stages
    at_most = num_stages * num_micro_batches / length
    assert speed_up(shares, num_micro_batches) == pytest.approx(at_most)


def test_slowest_stage_determines_the_time() -> None:
    assert speed_up([0.75, 0.25], 1000) == pytest.approx(1 / 0.75, rel=1e-3)


def test_number_of_stored_micro_batches() -> None:
    assert micro_batches_in_memory(3, 8, "gpipe") == [8, 8, 8]
    assert micro_batches_in_memory(3, 8, "1f1b") == [3, 2, 1]
    assert micro_batches_in_memory(3, 2, "1f1b") == [2, 2, 1]
    assert micro_batches_in_memory(4, 4, "interleaved", 2) == [4, 3, 2, 1]
    assert micro_batches_in_memory(3, 8, "zb") == [3, 4, 4]


@pytest.mark.parametrize(("devices", "per_device", "m"), [(2, 2, 2), (4, 2, 4), (4, 3, 32)])
def test_interleaved_stages_shorten_the_bubble(devices: int, per_device: int, m: int) -> None:
    num_stages = devices * per_device
    shares = [1 / num_stages] * num_stages
    best = planned_speed_up(shares, m, "interleaved", devices)
    assert best == pytest.approx(devices * m / (m + (devices - 1) / per_device))


@pytest.mark.parametrize(("devices", "m"), [(2, 3), (4, 8), (4, 32)])
def test_gradients_of_weights_fill_the_bubble(devices: int, m: int) -> None:
    best = planned_speed_up([1 / devices] * devices, m, "zb", devices)
    assert best == pytest.approx(devices * m / (m + devices / 3))


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(2, 1), (2, 8), (4, 3), (4, 16)])
def test_timeline_length_matches_the_formula(
    order: str, num_stages: int, num_micro_batches: int
) -> None:
    shares = [1 / num_stages] * num_stages
    passes = turns(shares, num_micro_batches, order)
    assert len(passes) == 2 * num_stages * num_micro_batches
    best = speed_up(shares, num_micro_batches)
    assert 1 / max(turn.end for turn in passes) == pytest.approx(best)
    kept = micro_batches_in_memory(num_stages, num_micro_batches, order)
    for stage, most in enumerate(kept):
        begun: Counter[str] = Counter()
        for turn in sorted((t for t in passes if t.stage == stage), key=lambda t: t.begin):
            begun[turn.kind] += 1
            assert begun["forward"] - begun["backward"] <= most


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
