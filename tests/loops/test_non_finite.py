"""A loss that becomes NaN or infinite is reported immediately, and can stop training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tfdist.checkpoint.settings import Checkpoints
from tfdist.checkpoint.store import Store
from tfdist.errors import ConfigurationError, NonFiniteError
from tfdist.trainer import Trainer

ROWS = 32
X = np.ones((ROWS, 2), "float32")
Y = np.ones((ROWS, 1), "float32")
#: The third of four batches contains NaN.
WITH_NAN = X.copy()
WITH_NAN[20] = np.nan


def build() -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="only")])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def fit(x: np.ndarray = WITH_NAN, **options: Any) -> Trainer:
    trainer = Trainer(build, "mirrored", devices=2, steps_per_call=1, **options)
    trainer.fit(x, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return trainer


def test_warns_once_with_step_metrics_and_weight() -> None:
    with pytest.warns(UserWarning, match="became nan") as caught:
        fit()
    (message,) = [str(w.message) for w in caught if "became nan" in str(w.message)]
    assert "loss, mae became nan in step 3 of epoch 1." in message
    assert "first weight that is not finite is 'sequential" in message


def test_stop_raises_at_the_step() -> None:
    with pytest.raises(NonFiniteError, match=r"nan in step 3 of epoch 1\. .*clipnorm"):
        fit(on_nan="stop")


def test_checkpoint_saves_the_state_to_a_separate_folder(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"The state was saved to .*non-finite/epoch-0000"):
        fit(on_nan="checkpoint", checkpoints=Checkpoints(tmp_path, every=1))
    assert [place.step for place in Store(tmp_path).places()] == [2, 1]  # intact
    ((path, packed),) = [Store(tmp_path / "non-finite").load_newest(print)]
    assert path.endswith("step-000000003")
    assert np.isnan(packed.arrays["model/00000"]).any()


def test_invalid_on_nan_raises() -> None:
    with pytest.raises(ConfigurationError, match="set checkpoints too"):
        fit(on_nan="checkpoint")
    with pytest.raises(ConfigurationError, match="on_nan='never': expected one of warn, stop"):
        fit(on_nan="never")


def test_steps_that_the_loss_scale_skips_are_not_reported() -> None:
    """One batch overflows in float16: its loss is infinite, and its step is skipped."""

    def scaled() -> keras.Model:
        layer = keras.layers.Dense(1, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((2,)), layer])
        model.compile(keras.optimizers.SGD(1e-3), "mse")
        return model

    x = X.copy()
    x[20] = 6e4
    trainer = Trainer(
        scaled, "one_device", precision="mixed_float16", on_nan="stop", steps_per_call=1
    )
    history = trainer.fit(x, Y, batch_size=8, epochs=1, shuffle=False, verbose=0).history
    assert not np.isfinite(history["loss"]).any()
    assert history["skipped_steps"] == [2]  # also the first step
    assert np.isfinite(trainer.model.get_weights()[0]).all()


def test_terminate_on_nan_takes_precedence() -> None:
    trainer = Trainer(build, "one_device", on_nan="stop", steps_per_call=1)
    callbacks = [keras.callbacks.TerminateOnNaN()]
    history = trainer.fit(WITH_NAN, Y, batch_size=8, epochs=2, callbacks=callbacks, verbose=0)
    assert len(history.epoch) == 1
