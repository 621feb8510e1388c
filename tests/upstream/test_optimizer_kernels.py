"""Training kernels: the updates are those of Keras, in one operation per weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.upstream.keras_optimizers import optimizers_of_one_device

#: More elements than Adam's kernel needs on a CPU.
SHAPE = (190, 180)
STEPS = 3


def trained(optimizer: Any, dtype: str, by_kernel: bool) -> tuple[list[np.ndarray], set[str]]:
    """Returns all variables after some steps, and the types of the operations of a step."""
    numbers = np.random.default_rng(0)
    weight = keras.Variable(numbers.normal(size=SHAPE), dtype=dtype)
    optimizer.build([weight])

    @tf.function
    def step(gradient: tf.Tensor) -> None:
        if by_kernel:
            with optimizers_of_one_device():
                optimizer.apply([gradient], [weight])
        else:
            optimizer.apply([gradient], [weight])

    gradients = [tf.constant(numbers.normal(size=SHAPE), dtype) for _ in range(STEPS)]
    for gradient in gradients:
        step(gradient)
    operations = step.get_concrete_function(gradients[0]).graph.get_operations()
    return [v.numpy() for v in [weight, *optimizer.variables]], {o.type for o in operations}


def operations_of_identical_steps(make: Callable[[], Any], dtype: str) -> set[str]:
    """Checks that steps are bitwise identical to those of Keras; returns their operations."""
    ours, operations = trained(make(), dtype, by_kernel=True)
    for value, expected in zip(ours, trained(make(), dtype, by_kernel=False)[0], strict=True):
        np.testing.assert_array_equal(value, expected)
    return operations


SGDS = {
    "plain": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "clipped and decayed": lambda: keras.optimizers.SGD(0.1, clipnorm=1.0, weight_decay=0.01),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("make", SGDS.values(), ids=SGDS)
def test_sgd_is_bitwise_identical_to_keras(
    make: Callable[[], keras.optimizers.Optimizer], dtype: str
) -> None:
    operations = operations_of_identical_steps(make, dtype)
    assert operations & {"ResourceApplyGradientDescent", "ResourceApplyKerasMomentum"}


@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 3e-5), ("float64", 1e-12)])
@pytest.mark.parametrize("kind", [keras.optimizers.Adam, keras.optimizers.AdamW])
def test_adam_differs_from_keras_by_rounding(
    kind: type[keras.optimizers.Optimizer], dtype: str, rounding: float
) -> None:
    rate = 0.01
    ours, operations = trained(kind(rate), dtype, by_kernel=True)
    expected, _ = trained(kind(rate), dtype, by_kernel=False)
    assert "ResourceApplyAdam" in operations
    np.testing.assert_allclose(ours[0], expected[0], rtol=0, atol=rounding * rate * STEPS)


class HalfRate(keras.optimizers.SGD):
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, 0.5 * learning_rate)


KERAS_OWN = {
    "a class that overrides update_step": (lambda: HalfRate(0.1), "float32"),
    "AMSGrad": (lambda: keras.optimizers.Adam(0.1, amsgrad=True), "float32"),
    "float16 weights": (lambda: keras.optimizers.SGD(0.1, momentum=0.9), "float16"),
}


@pytest.mark.parametrize(("make", "dtype"), KERAS_OWN.values(), ids=KERAS_OWN)
def test_other_updates_are_those_of_keras(
    make: Callable[[], keras.optimizers.Optimizer], dtype: str
) -> None:
    operations = operations_of_identical_steps(make, dtype)
    assert not any(kind.startswith("ResourceApply") for kind in operations)


def test_slots_on_another_device_are_updated_by_keras() -> None:
    """As those of `MultiOptimizer`, whose weights are sharded."""
    with tf.device("CPU:0"):
        weight = keras.Variable(np.ones(3))
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build([weight])
    with tf.device("CPU:1"):
        optimizer.momentums = [keras.Variable(np.zeros(3))]

    @tf.function
    def step() -> None:
        with optimizers_of_one_device():
            optimizer.apply([tf.ones(3)], [weight])

    step()
    np.testing.assert_allclose(weight, 0.9 * np.ones(3))


def test_weight_decay_and_clipping_evaluate_a_schedule_once() -> None:
    evaluations = []

    class Schedule(keras.optimizers.schedules.ExponentialDecay):
        def __call__(self, step: Any) -> Any:
            evaluations.append(step)
            return super().__call__(step)

    def make() -> keras.optimizers.Optimizer:
        schedule = Schedule(0.1, decay_steps=2, decay_rate=0.5)
        return keras.optimizers.AdamW(schedule, weight_decay=0.1, global_clipnorm=1.0)

    ours, _ = trained(make(), "float64", by_kernel=True)
    assert len(evaluations) == 1
    for value, expected in zip(ours, trained(make(), "float64", by_kernel=False)[0], strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-12)


@pytest.mark.parametrize("assign", ["assign_add", "assign_sub"])
def test_copies_of_an_embedding_stay_bitwise_equal(assign: str) -> None:
    """So many slices that TensorFlow adds those of a row in several threads."""
    random = np.random.default_rng(0)
    slices = tf.IndexedSlices(
        tf.constant(random.normal(size=(20_000, 32)), tf.float32),
        tf.constant(random.integers(0, 8, 20_000)),
    )
    results = set[bytes]()
    with optimizers_of_one_device(has_copies=True):
        for _ in range(10):
            copy = keras.Variable(np.zeros((8, 32), np.float32))
            getattr(keras.optimizers.SGD(), assign)(copy, slices)
            results.add(np.array(copy).tobytes())
    assert len(results) == 1
