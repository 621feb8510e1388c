"""Each supported form of a custom step, compared with plain Keras on one device."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from tensorflow.python.framework import random_seed

from tests.support import training
from tests.support.training import FIT, X, assert_close, assert_same_weights, building, mirrored
from tfdist.errors import UnsupportedModelError
from tfdist.trainer import Trainer


def mean(model: keras.Model, x: Any, y: Any) -> Any:
    return ops.mean((model(x, training=True) - y) ** 2)


def total(model: keras.Model, x: Any, y: Any) -> Any:
    return 0.1 * ops.sum((model(x, training=True) - y) ** 2)


def of_rows(model: keras.Model, x: Any, y: Any) -> Any:
    return 0.1 * (model(x, training=True) - y) ** 2


class Stepping(keras.Sequential):
    """Trains with one of the losses above."""

    loss_of = mean

    def train_step(self, data: Any) -> dict[str, Any]:
        return {"value": ops.sum(self.trained(data))}

    def trained(self, data: Any) -> Any:
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.loss_of(*data)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss


class Total(Stepping):
    loss_of = total


class OfRows(Stepping):
    loss_of = of_rows


class ByValues(Stepping):
    """Takes gradients with respect to values, which cannot be traced back to their variables."""

    def trained(self, data: Any) -> Any:
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = mean(self, *data)
        self.optimizer.apply(tape.gradient(loss, [v.value for v in weights]), weights)
        return loss


class OfGradients(Stepping):
    """Uses gradients of the weights inside its loss."""

    def trained(self, data: Any) -> Any:
        weights = self.trainable_variables
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = mean(self, *data)
            slopes = inner.gradient(loss, weights)
            steep = loss + 0.1 * sum(ops.sum(slope**2) for slope in slopes)
        self.optimizer.apply(outer.gradient(steep, weights), weights)
        return steep


class Resetting(Stepping):
    """Resets a metric in the step, so that it shows only the current batch."""

    def train_step(self, data: Any) -> dict[str, Any]:
        loss, tracker = self.trained(data), self.metrics[0]
        tracker.reset_state()
        tracker.update_state(loss)
        return {"current": tracker.result(), "value": loss}


class Summing(Stepping):
    """Adds the labels of each batch to a weight of the model."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen = self.add_weight(shape=(), initializer="ones", trainable=False, name="seen")

    def train_step(self, data: Any) -> dict[str, Any]:
        self.seen.assign_add(ops.sum(data[1]))
        return super().train_step(data)


class Tables(layers.Layer):
    """Adds a lookup by the values of a row to a lookup by position."""

    def build(self, shape: Any) -> None:
        self.by_value, self.by_position = layers.Embedding(4, 3), layers.Embedding(4, 3)
        self.by_value.build(shape)
        self.by_position.build(shape)

    def call(self, x: Any) -> Any:
        entries = ops.cast(ops.clip(ops.abs(x) * 2, 0, 3), "int32")
        return ops.mean(self.by_value(entries) + self.by_position(ops.arange(4)), 1)


def builder(
    cls: type = Stepping,
    hidden: Callable[[], Any] = lambda: layers.Dense(3, activation="tanh"),
    optimizer: Callable[[], Any] = lambda: keras.optimizers.SGD(0.1, momentum=0.5),
    **options: Any,
) -> Callable[[], keras.Model]:
    return building(
        lambda: cls([keras.Input((4,)), hidden(), layers.Dense(1)]), optimizer, **options
    )


def synchronized_norm() -> Any:
    return layers.BatchNormalization(synchronized=True)


class InBranch(Stepping):
    def trained(self, data: Any) -> Any:
        loss, bias = super().trained(data), self.layers[-1].bias
        tf.cond(loss > 0, lambda: bias.assign(bias * 0.5), lambda: bias.value)
        return loss


STEPS = {
    "sum": builder(Total),
    "of-rows": builder(OfRows),
    "adds-to-a-weight": builder(Summing),
    "sync-batch-norm": builder(hidden=synchronized_norm),
    "sync-batch-norm-sum": builder(Total, synchronized_norm),
    "tables-clipped": builder(
        hidden=Tables, optimizer=lambda: keras.optimizers.Adam(0.05, epsilon=1e-2, clipnorm=0.02)
    ),
    "averages-accumulated": builder(
        optimizer=lambda: keras.optimizers.SGD(
            0.1, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=2
        )
    ),
    "loss-scale": builder(
        optimizer=lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    ),
}
FULL_BATCH = {
    "eager": builder(run_eagerly=True),
    "by-values": builder(ByValues, optimizer=lambda: keras.optimizers.Adam(0.05, epsilon=1e-2)),
    "of-gradients": builder(OfGradients),
    "resetting": builder(Resetting),
    "in-branch": builder(InBranch),
}


@pytest.mark.parametrize("name", STEPS | FULL_BATCH)
def test_matches_one_device(name: str) -> None:
    build = (STEPS | FULL_BATCH)[name]
    plain, trainer = build(), mirrored(build)
    history = plain.fit(**FIT).history
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = trainer.fit(**FIT).history
    assert_same_weights(trainer.model, plain)
    assert_close({name: found[name] for name in history}, history)
    warned = [w for w in caught if "computes the full batch" in str(w.message)]
    assert bool(warned) == (name in FULL_BATCH)


class Drawing(Stepping):
    """Draws with Keras's global seed, with TensorFlow's seed, and in a layer."""

    def train_step(self, data: Any) -> dict[str, Any]:
        value = self.trained(data)
        drawn = {"keras": keras.random.normal(()), "tf": tf.random.normal(())}
        return {"value": value} | drawn


def test_keras_draws_match_one_device_and_tensorflow_draws_repeat() -> None:
    build = builder(Drawing, lambda: layers.Dropout(0.5))
    plain = build().fit(**FIT, epochs=2).history
    found, repeated = (mirrored(build).fit(**FIT, epochs=2).history for _ in range(2))
    assert found == repeated
    assert found["keras"] == pytest.approx(plain["keras"], 1e-5)
    # TensorFlow's stateful ops draw other numbers: this is the mean over the replicas.
    assert abs(found["tf"][0] - plain["tf"][0]) > 1e-3
    assert len(set(found["tf"])) == 2


class Attending(keras.Model):
    """Creates its weights in the first step, which draws their seeds from Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = layers.MultiHeadAttention(1, 2)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data[0][:, None], data[1][:, None]
        with tf.GradientTape() as tape:
            loss = ops.mean((self.attention(x, x) - y) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"value": loss}


def test_weights_created_by_the_first_step_match_one_device() -> None:
    plain = building(Attending)()
    plain.fit(**FIT)
    trainer = mirrored(building(Attending))
    trainer.fit(**FIT)
    assert_same_weights(trainer.model, plain)


class SeedsLast(Stepping):
    """Notes the seed of random operations after an exchange of gradients between the replicas."""

    seeds: ClassVar[list[int]] = []

    def train_step(self, data: Any) -> dict[str, Any]:
        value = self.trained(data)
        self.seeds.append(random_seed.get_seed(3)[0])
        return {"value": value}


def test_replicas_have_seeds_of_their_own_and_nothing_is_left_of_it() -> None:
    before = random_seed.get_seed
    mirrored(builder(SeedsLast)).fit(**FIT)
    first, second = SeedsLast.seeds[-2:]
    assert second == first + 1
    assert random_seed.get_seed is before


class ByRow(Stepping):
    def train_step(self, data: Any) -> dict[str, Any]:
        return {"rows": self.trained(data) + data[1][:, 0]}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (builder(ByRow), "returns 'rows' with a value for each row"),
        (builder(optimizer=lambda: keras.optimizers.ScheduleFreeAdamW()), "ScheduleFreeAdamW"),
    ],
)
def test_unsupported_step_raises(build: Callable[[], keras.Model], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        mirrored(build).fit(**FIT)


def test_tf_variable_in_a_step_raises() -> None:
    class Counting(Stepping):
        counter = tf.Variable(0.0)

        def trained(self, data: Any) -> Any:
            self.counter.assign_add(1.0)
            return super().trained(data)

    with pytest.raises(UnsupportedModelError, match=r"tf\.Variable .*add_weight"):
        mirrored(builder(Counting)).fit(**FIT)
    assert float(Counting.counter) == 0.0


class OfInputs(Stepping):
    """Takes its labels from the inputs."""

    def train_step(self, data: Any) -> dict[str, Any]:
        return super().train_step(data[0])


@pytest.mark.parametrize("form", [list, tuple])
def test_several_inputs_without_labels_reach_a_custom_step(form: Any) -> None:
    build = builder(OfInputs)
    options = FIT | {"x": form([FIT["x"], FIT["y"]]), "y": None}
    training.assert_trains_as_keras(mirrored(build), build(), **options)


class Sorting(Stepping):
    def trained(self, data: Any) -> Any:
        y = tf.numpy_function(lambda y: np.sort(y, 0), [data[1]], tf.float32)
        return super().trained((data[0], tf.ensure_shape(y, data[1].shape)))


@pytest.mark.parametrize(
    ("cls", "devices", "can"), [(Stepping, 1, True), (Sorting, 1, False), (Stepping, 2, False)]
)
def test_one_replica_is_in_xla_if_xla_can(cls: type, devices: int, can: bool) -> None:
    """XLA cannot call NumPy, and draws other numbers from the same seeds."""
    noisy = functools.partial(builder, cls, lambda: layers.GaussianNoise(1.0))
    trainer = Trainer(noisy(jit_compile=True), "mirrored", devices=devices)
    assert ("if XLA can compile it" in trainer.describe()["XLA"]) == (devices == 1)
    with nullcontext() if can else pytest.warns(match=r"jit_compile.* ignored.*train_step"):
        training.assert_trains_as_keras(trainer, noisy(jit_compile=can)(), **FIT, epochs=2)
    assert trainer.describe()["XLA"] == ("the whole step" if can else "no")


def test_custom_predict_step_is_honored() -> None:
    class Doubling(Stepping):
        def predict_step(self, data: Any) -> Any:
            return {"twice": 2.0 * super().predict_step(data)}

    build = builder(Doubling)
    found = mirrored(build).predict(X, batch_size=5, verbose=0)
    assert_close(found["twice"], build().predict(X, verbose=0)["twice"])
