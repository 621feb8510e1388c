"""The timeline, compared with the formula of the bubble."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.case import mlp
from tfdist.strategies.pipeline import bubble
from tfdist.strategies.pipeline.schedule import draw_timeline, micro_batches_in_memory, turns
from tfdist.strategies.pipeline.stages import Costs, into_stages


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(2, 1), (2, 8), (4, 3), (4, 16)])
def test_timeline_length_matches_the_formula(
    order: str, num_stages: int, num_micro_batches: int
) -> None:
    shares = [1 / num_stages] * num_stages
    passes = turns(shares, num_micro_batches, order)
    assert len(passes) == 2 * num_stages * num_micro_batches
    best = bubble.speed_up(shares, num_micro_batches)
    assert 1 / max(turn.end for turn in passes) == pytest.approx(best)
    kept = micro_batches_in_memory(num_stages, num_micro_batches, order)
    for stage, most in enumerate(kept):
        begun: Counter[str] = Counter()
        for turn in sorted((t for t in passes if t.stage == stage), key=lambda t: t.begin):
            begun[turn.kind] += 1
            assert begun["forward"] - begun["backward"] <= most


def test_draws_the_timeline(tmp_path: Path) -> None:
    stages = into_stages(mlp(), 2, costs=Costs("time", [[3.0, 1.0]] * 2))
    assert stages.shares() == [0.75, 0.25]
    draw_timeline(stages, 4, "1f1b", tmp_path / "stages.png")
    assert (tmp_path / "stages.png").stat().st_size > 1000
    draw_timeline(stages, 4, "zb", tmp_path / "zb.png")
    assert (tmp_path / "zb.png").stat().st_size > 1000
    draw_timeline(stages, 4, "interleaved", tmp_path / "one.png", num_devices=1)
    assert (tmp_path / "one.png").stat().st_size > 1000
