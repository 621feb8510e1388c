"""Dtype policies per model, and the rules of dynamic loss scaling."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import tfdist
from tests.support.training import building
from tfdist.errors import ConfigurationError
from tfdist.precision import POLICIES, LossScale

X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
Y = X[:, :1]


build = building(
    lambda: [keras.Input((4,)), layers.Dense(3), layers.Dense(1)],
    lambda: keras.optimizers.SGD(0.05),
)


def fitted(epochs: int = 4, x: np.ndarray = X, **options: Any) -> tfdist.Trainer:
    trainer = tfdist.Trainer(build, devices=2, **options)
    trainer.fit(x, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return trainer


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_trains_and_leaves_the_global_one(policy: str) -> None:
    trainer = fitted(precision=policy, epochs=6)
    losses = trainer.model.history.history["loss"]
    assert losses[-1] < losses[0]
    assert keras.config.dtype_policy().name == "float32"
    kept = "float32" if policy.startswith("mixed") else policy
    assert {v.dtype for v in trainer.model.trainable_variables} == {kept}
    scaled = isinstance(trainer.model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert scaled == ("float16" in policy and "bfloat16" not in policy)


def test_models_of_different_precision_share_a_process() -> None:
    half, full = fitted(precision="mixed_float16"), fitted()
    assert half.model.compute_dtype == "float16"
    assert full.model.compute_dtype == "float32"
    half.fit(X, Y, batch_size=8, verbose=0)
    full.fit(X, Y, batch_size=8, verbose=0)


def test_scale_grows_after_the_interval_by_the_factor() -> None:
    rule = LossScale(initial=8.0, growth_interval=3, growth_factor=4.0)
    history = fitted(loss_scale=rule).model.history.history  # two steps an epoch
    assert history["loss_scale"] == [8.0, 32.0, 128.0, 128.0]
    assert history["skipped_steps"] == [0.0] * 4


@pytest.mark.parametrize(
    ("rule", "scale"), [(LossScale(backoff_factor=0.25), 2.0**13), (LossScale.fixed(64.0), 64.0)]
)
def test_overflow_skips_the_step(rule: LossScale, scale: float) -> None:
    x = X.copy()
    x[9] = 1e38  # in the second batch: its gradient is infinite
    trainer = tfdist.Trainer(build, devices=2, loss_scale=rule)
    trainer.fit(x[:8], Y[:8], batch_size=8, verbose=0)
    before = trainer.model.get_weights()
    history = trainer.fit(x[8:], Y[8:], batch_size=8, verbose=0).history
    assert history["loss_scale"] == [scale]
    assert history["skipped_steps"] == [1.0]
    assert int(keras.ops.convert_to_numpy(trainer.model.optimizer.iterations)) == 1
    for found, expected in zip(trainer.model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_loss_scale_does_not_change_results() -> None:
    trainers = fitted(loss_scale=LossScale()), fitted()
    scaled, plain = (trainer.model.get_weights() for trainer in trainers)
    for found, expected in zip(scaled, plain, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "options", [{"initial": 0.0}, {"growth_factor": 0.5}, {"backoff_factor": 2.0}]
)
def test_invalid_loss_scale_raises(options: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="expected initial > 0"):
        LossScale(**options)


def test_unknown_policy_raises() -> None:
    with pytest.raises(ConfigurationError, match="mixed_bfloat16"):
        tfdist.Trainer(build, devices=2, precision="float8")


def float8(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.quantize("float8")
    optimizer = keras.optimizers.SGD(0.01, **options)
    scaled = keras.optimizers.LossScaleOptimizer(optimizer, 1024.0) if not options else optimizer
    model.compile(scaled, "mse", jit_compile=False)
    return model


@pytest.mark.parametrize(
    ("strategy", "accumulate", "every"),
    [
        ("mirrored", 1, None),
        pytest.param("mirrored", 1, 2, marks=pytest.mark.long),
        pytest.param("mirrored", 2, None, marks=pytest.mark.long),
        pytest.param("sharded", 1, None, marks=pytest.mark.long),
    ],
)
def test_float8_has_the_maxima_of_one_device(
    strategy: str, accumulate: int, every: int | None, recwarn: pytest.WarningsRecorder
) -> None:
    options = {"gradient_accumulation_steps": every} if every else {}
    plain = float8(**options)
    trainer = tfdist.Trainer(
        lambda: float8(**options), strategy=strategy, devices=2, accumulate=accumulate
    )
    x = np.concatenate([X, 9 * X[:1]])  # in the last batch, the other replica has no rows
    y = np.concatenate([Y, Y[:1]])
    for model in (plain, trainer):
        model.fit(x, y, batch_size=4, shuffle=False, epochs=2, verbose=0)
    assert not any("full batch" in str(one.message) for one in recwarn)
    maxima = [v for v in plain.variables if "amax" in v.path or v.path.endswith("scale")]
    assert len(maxima) == 12
    for one, other in zip(plain.variables, trainer.model.variables, strict=True):
        # Sums in another order may be rounded to the next number of float8.
        np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-3, err_msg=one.path)
