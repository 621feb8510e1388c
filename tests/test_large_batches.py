"""Growing batches, schedules and averaged weights, compared with one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from recipes import digits
from tests.support.training import STRATEGIES, X, Y, build, building, dataset, mirrored
from tfdist import Trainer, schedules
from tfdist.config import TrainConfig
from tfdist.errors import ConfigurationError, DataError
from tfdist.run import from_config, recipe

GROWING = {0: 4, 1: 7, 3: 15}


def gradient_descent(x: np.ndarray, y: np.ndarray, batches: list[int], rate: float) -> np.ndarray:
    """Computes a linear model's weights after gradient descent on batches of these sizes."""
    rows = np.c_[x, np.ones(len(x))].astype("float64")
    w, begin = np.zeros((x.shape[1] + 1, 1)), 0
    for size in batches:
        part, labels = rows[begin : begin + size], y[begin : begin + size]
        w -= rate * 2 * part.T @ (part @ w - labels) / len(part)
        begin = (begin + size) % len(x)
    return w


linear = building(lambda: [keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="zeros")])


def weights(trainer: Trainer) -> np.ndarray:
    kernel, bias = trainer.model.get_weights()
    return np.r_[kernel, bias[None]]


@pytest.mark.parametrize(("strategy", "devices"), STRATEGIES)
def test_growing_batches_match_gradient_descent(strategy: str, devices: int) -> None:
    """Fifteen rows make batches of 4, 4, 4, 3, then twice of 7, 7, 1, then of 15."""
    trainer = Trainer(linear, strategy, devices=devices)
    trainer.fit(X, Y, batch_size=GROWING, epochs=4, shuffle=False, verbose=0)
    expected = gradient_descent(X, Y, [4, 4, 4, 3, *[7, 7, 1] * 2, 15], 0.1)
    np.testing.assert_allclose(weights(trainer), expected, atol=2e-6)
    assert trainer.model.optimizer.iterations == 11


def test_growing_batches_of_a_dataset() -> None:
    """The dataset is rebatched. Callbacks get the number of steps per epoch if it is known."""
    result = mirrored(linear)
    result.fit(dataset(5), batch_size=GROWING, epochs=4, verbose=0)
    expected = gradient_descent(X, Y, [4, 4, 4, 3, *[7, 7, 1] * 2, 15], 0.1)
    np.testing.assert_allclose(weights(result), expected, atol=2e-6)
    steps = []
    callback = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: steps.append(callback.params["steps"])
    )
    result.fit(X, Y, batch_size=GROWING, epochs=4, initial_epoch=2, callbacks=[callback], verbose=0)
    assert steps == [3, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": {1: 4}}, "with a size for epoch 0"),
        ({"batch_size": {0: 0}}, "sizes of at least 1"),
        ({"batch_size": {0: 4}, "steps_per_epoch": 2}, "cannot be combined with steps_per_epoch"),
        ({"batch_size": {0: 4}, "x": iter([(X, Y)]), "y": None}, "with initial_epoch"),
    ],
)
def test_invalid_growing_batches_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigurationError, DataError), match=message):
        mirrored(linear).fit(**{"x": X, "y": Y, "verbose": 0, **options})


def test_batches_with_fewer_rows_than_replicas() -> None:
    result = mirrored(linear)
    with pytest.warns(UserWarning, match="so some are idle"):
        result.fit(X, Y, batch_size=1, shuffle=False, verbose=0)
    np.testing.assert_allclose(weights(result), gradient_descent(X, Y, [1] * 15, 0.1), atol=2e-6)


def test_schedule_counts_steps_of_growing_batches() -> None:
    """20 full batches of 64 are 1,280 rows: 40 batches of 32 per epoch, and 13 of 100."""
    config = TrainConfig(
        batch_size=64, batch_warmup="32:3,100:2", epochs=10, lr_rule="step",
        lr_decay_epochs=[2, 4, 6], learning_rate=1.0, warmup_epochs=0.5,
    )  # fmt: skip
    assert schedules.batch_sizes(config) == {0: 32, 3: 100, 5: 64}
    rule: Any = schedules.learning_rate(config, 20)
    changes = [2 * 40, 3 * 40 + 13, 3 * 40 + 2 * 13 + 20]
    for i, step in enumerate(changes):
        assert [float(rule(step - 1)), float(rule(step))] == pytest.approx([0.1**i, 0.1 ** (i + 1)])
    assert float(rule(10)) == pytest.approx(0.5)
    assert from_config.fit_arguments(config, None, None)["batch_size"] == {0: 32, 3: 100, 5: 64}
    assert from_config.first_batch_size(config) == 32


def test_mixup_is_independent_of_the_number_of_replicas(tmp_path: Path) -> None:
    """Mixup is independent of the number of replicas, and probing the first batch is neutral."""
    settings = {"dropout": 0.0, "mixup": 0.4}
    config = TrainConfig(**{**digits.DEFAULTS, "data_dir": str(tmp_path), "set": settings})

    def losses(strategy: str, devices: int) -> list[float]:
        data = digits.train_data(config).take(3)

        def build_model() -> keras.Model:
            keras.utils.set_random_seed(1)
            return digits.build_model(config, recipe.num_steps(data))

        trainer = Trainer(build_model, strategy, devices=devices)
        return trainer.fit(data, epochs=2, verbose=0).history["loss"]

    assert losses("mirrored", 3) == pytest.approx(losses("one_device", 1), rel=2e-5)


def test_averaged_weights_are_validated_and_kept() -> None:
    """`--ema`: validation uses the averages, which are the model's weights after training."""
    callbacks = from_config.averages(TrainConfig(ema=0.5))
    result = mirrored(lambda: build(keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.5)))
    history = result.fit(X, Y, validation_data=(X, Y), epochs=3, callbacks=callbacks, verbose=0)
    kept = result.evaluate(X, Y, verbose=0)
    assert kept == pytest.approx(history.history["val_loss"][-1], rel=1e-5)
    assert kept != pytest.approx(history.history["loss"][-1], rel=1e-3)
