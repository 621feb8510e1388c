"""The picture of a training's metrics."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import pytest

from tfdist.callbacks import curves
from tfdist.callbacks.curves import Curves


def run(callback: Curves, epochs: list[dict[str, float]]) -> None:
    callback.on_train_begin()
    for number, logs in enumerate(epochs):
        callback.on_epoch_end(number, logs)


def test_picture_is_drawn_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    callback = Curves(path)
    run(callback, [{"loss": 1.0, "val_loss": 1.1, "accuracy": 0.5}] * 3)
    assert not path.exists()  # epochs are too short to draw a picture for each
    callback.on_train_end()
    height, width = matplotlib.image.imread(path).shape[:2]
    assert width > height  # two panels side by side
    assert list(tmp_path.iterdir()) == [path]


def test_picture_is_drawn_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "_REDRAW_SECONDS", 0.0)
    run(Curves(tmp_path / "curves.png"), [{"loss": 1.0}])
    assert (tmp_path / "curves.png").exists()


def test_metrics_may_be_missing_in_some_epochs(tmp_path: Path) -> None:
    callback = Curves(tmp_path / "curves.png")
    run(callback, [{"loss": 1.0}, {"loss": 0.5, "val_loss": 0.6}, {"loss": float("nan")}])
    callback.on_train_end()
    assert (tmp_path / "curves.png").exists()


def test_many_metrics_use_several_rows() -> None:
    names = [f"metric_{i}" for i in range(7)]
    drawn = curves.figure([1, 2], {name: [1.0, 2.0] for name in names}, "smoke run")
    assert [axes.get_title() for axes in drawn.axes] == names
    width, height = drawn.get_size_inches()
    assert 1 <= width / height <= 2
    assert drawn.get_suptitle() == "smoke run"


@pytest.mark.parametrize(("epochs", "ticks"), [([1], [1]), ([4, 5], [4, 5]), ([1, 2], [1, 2])])
def test_ticks_are_epochs(epochs: list[int], ticks: list[int]) -> None:
    drawn = curves.figure(epochs, {"loss": [0.5] * len(epochs)}, "")
    low, high = drawn.axes[0].get_xlim()
    assert [tick for tick in drawn.axes[0].get_xticks() if low <= tick <= high] == ticks


def test_no_picture_without_an_epoch(tmp_path: Path) -> None:
    callback = Curves(tmp_path / "curves.png")
    run(callback, [])
    callback.on_train_end()
    assert not (tmp_path / "curves.png").exists()
