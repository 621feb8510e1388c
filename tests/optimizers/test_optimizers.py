"""The optimizers, compared with the formulas of their papers in NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.case import mlp
from tfdist import optimizers, schedules
from tfdist.config import TrainConfig
from tfdist.errors import ConfigurationError

RANDOM = np.random.default_rng(0)
KERNEL, BIAS = RANDOM.normal(size=(4, 3)), RANDOM.normal(size=(3,))
GRADIENTS = [(RANDOM.normal(size=(4, 3)), RANDOM.normal(size=(3,))) for _ in range(4)]
RATES = [0.2, 0.2, 0.02, 0.02]
MOMENTUM, DECAY, TRUST = 0.9, 0.1, 0.05


def applied(optimizer: keras.optimizers.Optimizer) -> list[np.ndarray]:
    """Returns the kernel and the bias after four steps with given gradients."""
    weights = [
        keras.Variable(start, dtype="float64", name=name)
        for start, name in ((KERNEL, "kernel"), (BIAS, "bias"))
    ]
    for gradients in GRADIENTS:
        optimizer.apply([tf.constant(g) for g in gradients], weights)
    return [np.asarray(weight) for weight in weights]


def falling() -> Any:
    return keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.2, 0.02])


def test_momentum_sgd_matches_equation_9() -> None:
    """Goyal et al. 2017: u <- m u + g + d w; w <- w - r u. Biases have no weight decay."""
    expected = []
    for index, (start, decay) in enumerate(((KERNEL, DECAY), (BIAS, 0.0))):
        w, u = start.copy(), np.zeros_like(start)
        for gradients, rate in zip(GRADIENTS, RATES, strict=True):
            u = MOMENTUM * u + gradients[index] + decay * w
            w -= rate * u
        expected.append(w)
    result = applied(optimizers.MomentumSGD(falling(), MOMENTUM, weight_decay=DECAY))
    np.testing.assert_allclose(result[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(result[1], expected[1], rtol=1e-6)


def test_momentum_correction_matches_equation_10() -> None:
    """Remark 2: v <- m (r_t / r_t-1) v + r_t g; w <- w - v. Keras's SGD omits the factor."""
    w, v, before = KERNEL.copy(), np.zeros_like(KERNEL), RATES[0]
    for (gradient, _), rate in zip(GRADIENTS, RATES, strict=True):
        v, before = MOMENTUM * (rate / before) * v + rate * gradient, rate
        w -= v
    np.testing.assert_allclose(applied(optimizers.MomentumSGD(falling()))[0], w, rtol=1e-6)
    plain = applied(keras.optimizers.SGD(falling(), momentum=MOMENTUM))[0]
    assert np.abs(plain - w).max() > 0.01


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_sgd_at_constant_rate_matches_keras_sgd(nesterov: bool) -> None:
    ours = applied(optimizers.MomentumSGD(0.1, MOMENTUM, nesterov))
    theirs = applied(keras.optimizers.SGD(0.1, MOMENTUM, nesterov))
    for own, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-6)


def test_lars_matches_algorithm_1() -> None:
    """You et al. 2017: q = t |w| / (|g| + d |w|); v <- m v + r q (g + d w); w <- w - v."""
    w, v = KERNEL.copy(), np.zeros_like(KERNEL)
    b, u = BIAS.copy(), np.zeros_like(BIAS)
    for (gradient, bias_gradient), rate in zip(GRADIENTS, RATES, strict=True):
        norm = np.linalg.norm(w)
        q = TRUST * norm / (np.linalg.norm(gradient) + DECAY * norm)
        v = MOMENTUM * v + rate * q * (gradient + DECAY * w)
        w -= v
        u = MOMENTUM * u + rate * bias_gradient  # neither layer-wise rate nor weight decay
        b -= u
    result = applied(optimizers.LARS(falling(), MOMENTUM, DECAY, TRUST))
    np.testing.assert_allclose(result[0], w, rtol=1e-6)
    np.testing.assert_allclose(result[1], b, rtol=1e-6)


def test_lars_of_norm_zero_moves_by_the_global_rate() -> None:
    weight = keras.Variable(np.zeros(2), name="kernel")
    optimizer = optimizers.LARS(0.5, momentum=0.0, weight_decay=DECAY)
    optimizer.apply([tf.constant([1.0, -2.0])], [weight])
    np.testing.assert_allclose(weight, [-0.5, 1.0])
    optimizer.apply([tf.zeros(2)], [weight])
    assert np.isfinite(np.asarray(weight)).all()


def test_duplicate_slices_are_summed() -> None:
    """A row that was looked up twice has the sum of both gradients, also in the norm."""
    slices = tf.IndexedSlices(tf.constant([[1.0], [2.0]]), tf.constant([1, 1]), tf.constant([3, 1]))
    dense = tf.constant([[0.0], [3.0], [0.0]])
    for make in (optimizers.LARS, optimizers.MomentumSGD):
        results = []
        for gradient in (slices, dense):
            weight = keras.Variable(np.ones((3, 1)), name="embeddings")
            make(0.5, weight_decay=DECAY).apply([gradient], [weight])
            results.append(np.asarray(weight))
        np.testing.assert_array_equal(*results)


@pytest.mark.parametrize(
    "optimizer",
    [
        optimizers.LARS(schedules.polynomial(0.3, 9, warmup_steps=3), 0.8, 0.1, 0.02, ["b"]),
        optimizers.MomentumSGD(0.1, 0.8, True, 0.1, clipnorm=1.0, use_ema=True),
    ],
)
def test_save_and_load_round_trip(optimizer: keras.optimizers.Optimizer, tmp_path: Path) -> None:
    model = mlp()
    model.compile(optimizer, "mse")
    model.fit(np.ones((4, 4)), np.ones((4, 1)), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config() == optimizer.get_config()
    for own, other in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(own, other)


def test_biases_and_norms_do_not_decay() -> None:
    layers = [keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()]
    model = keras.Sequential([*layers, keras.layers.LayerNormalization(), keras.layers.Dense(2)])
    before = [np.asarray(v) for v in model.trainable_variables]
    for name in ("adam", "lamb", "sgd", "lars"):
        config = TrainConfig(optimizer=name, weight_decay=0.1)
        optimizer = optimizers.create(config, 0.1)
        optimizer.apply([tf.zeros(v.shape) for v in before], model.trainable_variables)
        for old, variable in zip(before, model.trainable_variables, strict=True):
            moved = not np.array_equal(old, variable)
            assert moved == (variable.name == "kernel"), (name, variable.path)
            variable.assign(old)


def test_creates_the_optimizer_of_a_configuration() -> None:
    config = TrainConfig(optimizer="lars", momentum=0.5, weight_decay=0.1, ema=0.9)
    optimizer = optimizers.create(config, 0.2)
    results = {"momentum": 0.5, "weight_decay": 0.1, "use_ema": True, "ema_momentum": 0.9}
    assert type(optimizer) is optimizers.LARS
    assert results.items() <= optimizer.get_config().items()
    assert type(optimizers.create(TrainConfig(), 0.2)) is keras.optimizers.Adam


def test_momentum_out_of_range_raises() -> None:
    with pytest.raises(ConfigurationError, match="momentum from 0 to below 1"):
        optimizers.LARS(momentum=1.0)
