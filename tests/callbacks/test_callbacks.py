"""The picture of metrics, early stopping, and the warning about other batch sizes."""

from __future__ import annotations

from pathlib import Path

import keras
import matplotlib.image
import pytest
import tensorflow as tf

from tests.support.training import FIT, X, Y, build
from tfdist import Trainer
from tfdist.callbacks import curves
from tfdist.callbacks.batch_size import BatchSize
from tfdist.callbacks.curves import Curves
from tfdist.callbacks.early_stopping import EarlyStopping
from tfdist.errors import ConfigurationError


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


def fit_in_batches(batch_size: int, expected: int) -> None:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch_size)
    trainer = Trainer(build, "one_device")
    callback: keras.callbacks.Callback = BatchSize(trainer.stats, expected)
    trainer.fit(data, epochs=2, verbose=0, callbacks=[callback])


def test_warns_once_about_another_batch_size() -> None:
    with pytest.warns(UserWarning, match="but batch_size is 4") as caught:
        fit_in_batches(2, 4)
    assert len(caught) == 1


@pytest.mark.filterwarnings("error::UserWarning")
def test_partial_batch_does_not_warn() -> None:
    fit_in_batches(7, 7)


def test_stops_without_improvement() -> None:
    model = build()
    model.optimizer.learning_rate = 0.0
    history = model.fit(**FIT, epochs=20, callbacks=[EarlyStopping("loss", patience=2)])
    assert len(history.epoch) == 3


def test_missing_metric_raises() -> None:
    callback = EarlyStopping("val_los", patience=2)
    with pytest.raises(ConfigurationError, match=r"expected one of loss, val_loss\. .* val_loss\?"):
        build().fit(**FIT, validation_split=0.5, callbacks=[callback])
