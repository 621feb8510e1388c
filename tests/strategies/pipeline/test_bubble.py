"""The formula of the pipeline bubble, compared with a simulated schedule."""

from __future__ import annotations

from collections import Counter

import pytest

from tfdist.strategies.pipeline.schedule import (
    micro_batches_in_memory,
    planned_speed_up,
    speed_up,
    turns,
)


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
