"""The profile of a folder as a user asks for it: what it tells, never how fast."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import pipelines
from pipelines.profile.__main__ import main
from pipelines.profile.stages import ADVICE, measure
from tests.support import numbers


def test_stages_of_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert "takes most" in printed
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_stages_without_images(tmp_path: Path) -> None:
    numbers.write(tmp_path, 30, 2)
    stages = measure(tmp_path, batch_size=8, size=(8, 8), seconds=0.05)
    assert [stage.name for stage in stages] == ["read", "parse", "batch"]
    assert all(stage.records_per_s > 0 for stage in stages)


def test_folder_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: ")
