"""A loss that leaves the band of its recent values."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest

import tfdist
from tfdist.callbacks.loss_spikes import LossSpikes
from tfdist.checkpoint.settings import Checkpoints
from tfdist.errors import ConfigurationError, LossSpikeError


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
