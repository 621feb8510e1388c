"""Optimizers with sharded state compute element by element; others are not sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.groups.base import shard_sizes
from tfdist.strategies.sharded import plan
from tfdist.strategies.sharded.division import OverDevices
from tfdist.upstream.keras_optimizers import optimizers_of_one_device
from tfdist.upstream.keras_variables import ShardedGradient, ShardedVariable, divide, share_identity

RANDOM = np.random.default_rng(0)
WEIGHT = RANDOM.normal(size=(3, 5)).astype("float32")
GRADIENTS = [RANDOM.normal(size=(3, 5)).astype("float32") for _ in range(2)]
#: Options with which an optimizer has further variables.
OPTIONS: dict[type, dict[str, Any]] = {
    keras.optimizers.SGD: {"momentum": 0.9, "nesterov": True},
    keras.optimizers.RMSprop: {"momentum": 0.9, "centered": True},
    keras.optimizers.Adam: {"amsgrad": True},
}


def updated(make: Callable[[], keras.optimizers.Optimizer], is_sharded: bool) -> list[np.ndarray]:
    """Returns a weight and all optimizer variables after two updates."""
    weight, optimizer = keras.Variable(WEIGHT), make()
    optimizer.build([weight])
    if is_sharded:
        state = [v for v in optimizer.variables if v.shape == weight.shape]
        for variable in [weight, *state]:
            divide(variable, OverDevices(2), ["CPU:0", "CPU:0"], keep_whole=False)
            assert isinstance(variable, ShardedVariable)
            assert [part.shape for part in variable.parts] == [(8,), (7,)]
    for gradient in GRADIENTS:
        given: Any = tf.constant(gradient)
        if isinstance(weight, ShardedVariable):
            given = ShardedGradient(weight.cut(given))
        with optimizers_of_one_device():
            optimizer.apply([given], [weight])
    return [v.numpy() for v in (weight, *optimizer.variables)]


@pytest.mark.parametrize("kind", plan.ELEMENTWISE)
def test_shards_match_the_full_update(kind: Any) -> None:
    def make() -> keras.optimizers.Optimizer:
        common = {"learning_rate": 0.1, "weight_decay": 0.01, "use_ema": True}
        return kind(**common, global_clipnorm=2.0, **OPTIONS.get(kind, {}))

    for found, wanted in zip(updated(make, True), updated(make, False), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("clipping", [{"clipnorm": 0.5}, {"clipvalue": 0.3}])
def test_clipping_uses_full_gradients(clipping: dict[str, float]) -> None:
    def make() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(0.1, **clipping)

    np.testing.assert_allclose(updated(make, True)[0], updated(make, False)[0], rtol=2e-6)


def test_matrix_optimizers_are_not_sharded() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    for kind in (keras.optimizers.Lamb, keras.optimizers.Muon, keras.optimizers.Adafactor):
        assert "each element" in str(plan.reason_whole(model, [kind()]))


def test_remainder_goes_to_the_first_shards() -> None:
    assert shard_sizes(11, 4) == [3, 3, 3, 2]


def test_optimizer_finds_a_shard_by_its_weight() -> None:
    one, other = tf.Variable(0.0), tf.Variable(0.0)
    share_identity(one, other)
    assert keras.optimizers.SGD()._var_key(one) == keras.optimizers.SGD()._var_key(other)
