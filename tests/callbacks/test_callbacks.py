"""The picture of metrics, early stopping, and the warning about other batch sizes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import keras
import matplotlib.image
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.support.training import FIT, X, Y, build
from tfdist import Trainer
from tfdist.callbacks import curves
from tfdist.callbacks.batch_size import BatchSize
from tfdist.callbacks.curves import Curves
from tfdist.callbacks.early_stopping import EarlyStopping
from tfdist.callbacks.loss_spikes import LossSpikes
from tfdist.checkpoint.settings import Checkpoints
from tfdist.errors import ConfigurationError, LossSpikeError


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


# ---- loss spikes ----


def feed(spikes: LossSpikes, losses: list[float]) -> None:
    """Calls the callback with the mean over the epoch so far, as Keras does."""
    call = SimpleNamespace(result=SimpleNamespace(num_rows=10))
    spikes._stats = SimpleNamespace(last_call=call)
    spikes.on_epoch_begin(0)
    for i, mean in enumerate(np.cumsum(losses) / np.arange(1, len(losses) + 1)):
        spikes.on_train_batch_end(i, {"loss": mean})


NOISE = list(1 + np.random.default_rng(0).normal(scale=0.1, size=200))


def test_names_the_step_of_a_spike() -> None:
    with pytest.raises(LossSpikeError, match=r"steps 101 to 101 is 3, .*--step 101"):
        feed(LossSpikes(None, "stop"), [*NOISE[:100], 3.0, *NOISE[100:]])


def test_a_spike_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    feed(LossSpikes(None, "warn"), [*NOISE[:100], 3.0, 9.0, 27.0, *NOISE[100:]])
    assert capsys.readouterr().err.count("warning: The loss of steps") == 1


@pytest.mark.parametrize("losses", [NOISE, [5.0, *NOISE], list(np.geomspace(9, 0.1, 300))])
def test_no_spike_without_one(losses: list[float]) -> None:
    feed(LossSpikes(None, "stop"), losses)


def test_unknown_choice_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="expected one of warn, stop, rollback"):
        LossSpikes(None, "ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["one_device", "mirrored"])
@pytest.mark.parametrize("skipped", [[(1, 2)], [(3, 3), (7, 9)]])
def test_skipped_steps_are_those_of_data_without_them(
    strategy: str, skipped: list[tuple[int, int]], tmp_path: Path
) -> None:
    x = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    saves = Checkpoints(tmp_path / "saves", every=4)
    trainer = tfdist.Trainer(_build, strategy, devices=None, checkpoints=saves)
    trainer.skipped_steps = skipped
    trainer.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    keras_model = _build()
    for step in range(12):
        if not any(first <= step + 1 <= last for first, last in skipped):
            rows = slice(step % 6 * 4, step % 6 * 4 + 4)
            keras_model.train_on_batch(x[rows], y[rows])
    for weight, expected in zip(trainer.model.weights, keras_model.weights, strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-6, atol=1e-7)


def _build() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    return model
