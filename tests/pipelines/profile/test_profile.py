"""The output of the profile command, without its measured times."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from matplotlib.backends.backend_agg import FigureCanvasAgg

import pipelines
from pipelines.profile import stages
from pipelines.profile.__main__ import main
from pipelines.profile.stages import ADVICE, Stage, draw_chart, measure
from tests.support import numbers


def test_stages_of_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "SHORTEST_EPOCH", 3600.0)  # on a machine of any speed
    image = tf.io.encode_jpeg(np.zeros((40, 50, 3), np.uint8)).numpy()
    features = [pipelines.Feature(name="x", dtype="uint8", shape=(None, None, 3), encoding="jpeg")]
    examples = ({"x": image} for _ in range(20))
    pipelines.write_shards(examples, tmp_path / "d", features, num_shards=2, source="black")
    chart = tmp_path / "chart.png"
    flags = ["--seconds", "0.05", "--batch-size", "4", "--chart", str(chart)]
    assert main([str(tmp_path / "d"), *flags]) == 0
    printed = capsys.readouterr().out
    for stage in ADVICE:
        assert stage in printed
    assert "Too small to measure:" in printed
    assert "slowest stage" not in printed
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_stages_without_images(tmp_path: Path) -> None:
    numbers.write(tmp_path, 30, 2)
    timed = measure(tmp_path, batch_size=8, size=(8, 8), seconds=0.05)
    assert [stage.name for stage in timed] == ["read", "parse", "batch"]
    assert all(stage.records_per_s > 0 for stage in timed)


def test_long_epoch_gets_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "SHORTEST_EPOCH", 0.0)
    numbers.write(tmp_path / "d", 30, 2)
    flags = ["--seconds", "0.05", "--batch-size", "4", "--chart", str(tmp_path / "chart.png")]
    assert main([str(tmp_path / "d"), *flags]) == 0
    printed = capsys.readouterr().out
    assert "slowest stage" in printed
    assert "too small" not in printed


def test_texts_of_the_chart_are_inside_its_axes(tmp_path: Path) -> None:
    timed = [Stage("read", 1234567.8, 1.0), Stage("parse", 3.0, 1.0)]
    drawn = draw_chart(timed, "data/x: reading", tmp_path / "chart.png")
    (axes,) = drawn.axes
    assert axes.get_title() == "data/x: reading"
    renderer = FigureCanvasAgg(drawn).get_renderer()
    right = axes.get_window_extent(renderer).x1
    assert all(text.get_window_extent(renderer).x1 <= right for text in axes.texts)
