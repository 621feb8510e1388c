"""Replicas of one process stay equal, and their variables have the names of the model's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfdist import devices, strategies
from tfdist.errors import DataError, UnsupportedModelError
from tfdist.trainer import Trainer

X = np.linspace(-1, 1, 40, dtype="float32").reshape(10, 4)
Y = X[:, :1] ** 2
FIT: dict[str, Any] = {"x": X, "y": Y, "batch_size": 5, "shuffle": False, "verbose": 0}


@pytest.fixture(autouse=True)
def _two_devices() -> None:
    devices.configure(2)


def building(make: Callable[[], keras.optimizers.Optimizer]) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        outputs = layers.Dense(2, name="head")(layers.Dense(4, "tanh", name="body")(inputs))
        model = keras.Model(inputs, layers.Dense(1, name="last")(outputs), name="net")
        model.compile(make(), "mse")
        return model

    return build


class Recording(keras.optimizers.SGD):
    """Notes what it can see of each variable."""

    def __init__(self) -> None:
        super().__init__(0.1)
        self.seen: set[tuple[str, tuple[int, ...], str, bool]] = set()

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        shape = tuple(variable.shape)
        self.seen.add((variable.name, shape, variable.dtype.name, variable.trainable))
        super().update_step(gradient, variable, learning_rate)


def test_optimizers_see_the_names_of_the_variables_under_every_strategy() -> None:
    plain = building(Recording)()
    plain.fit(**FIT)
    for name, options in {
        "one_device": {},
        "mirrored": {},
        "central_storage": {},
        "towers": {},
        "pipeline": {},
        "sharded": {"smallest": 1},
        "tensor_parallel": {"smallest": 1},
    }.items():
        number = None if name == "one_device" else 2
        strategy = strategies.create(name, number, **options)
        trainer = Trainer(building(Recording), strategy)
        trainer.fit(**FIT)
        assert trainer.model.optimizer.seen == plain.optimizer.seen, name


@pytest.mark.parametrize("strategy", ["one_device", "mirrored", "sharded"])
def test_weights_are_excluded_from_weight_decay_by_the_names_of_layers(strategy: str) -> None:
    def adam() -> keras.optimizers.Optimizer:
        optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5, epsilon=0.01)
        optimizer.exclude_from_weight_decay(var_names=["head", "bias"])
        return optimizer

    plain = building(adam)()
    plain.fit(**FIT)
    options = {"shard": "optimizer", "smallest": 1} if strategy == "sharded" else {}
    number = None if strategy == "one_device" else 2
    trainer = Trainer(building(adam), strategies.create(strategy, number, **options))
    trainer.fit(**FIT)
    for own, expected in zip(trainer.model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-5)


def test_replicas_that_drift_apart_are_an_error() -> None:
    class ByCall(keras.optimizers.SGD):
        calls = 0

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            self.calls += 1
            super().update_step(gradient * self.calls, variable, learning_rate)

    trainer = Trainer(building(lambda: ByCall(0.1)), "mirrored", devices=2)
    with pytest.raises(UnsupportedModelError, match=r"'body/kernel' differs .* after step 1"):
        trainer.fit(**FIT, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=print)])


@pytest.mark.parametrize("kind", [tf.Variable, keras.Variable])
def test_variables_that_replicas_would_assign_repeatedly_are_refused(kind: Any) -> None:
    class Counting(keras.optimizers.SGD):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            hidden[0].assign_add(1.0)
            super().update_step(gradient, variable, learning_rate)

    hidden = [kind(0.0)]
    trainer = Trainer(building(lambda: Counting(0.1)), "mirrored", devices=2)
    with pytest.raises(UnsupportedModelError, match=r"self\.add_variable in build"):
        trainer.fit(**FIT)


def test_a_variable_in_an_attribute_of_an_optimizer_is_one_of_its_variables() -> None:
    class Averaging(keras.optimizers.SGD):
        def __init__(self) -> None:
            super().__init__(0.1)
            self.inner = keras.optimizers.SGD(0.1, momentum=0.9)
            self.norms = {"mean": keras.Variable(1.0, trainable=False)}

        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            norm = sum(tf.reduce_sum(tf.square(g)) for g in grads)
            self.norms["mean"].assign(0.5 * self.norms["mean"] + 0.5 * norm)
            self.learning_rate.assign(0.9 * self.learning_rate)
            self.inner.apply([g / self.norms["mean"] for g in grads], trainable_variables)

        def build(self, variables: Any) -> None:
            super().build(variables)
            self.inner.build(variables)

    plain = building(Averaging)()
    plain.fit(**FIT)
    trainer = Trainer(building(Averaging), "mirrored", devices=2)
    trainer.fit(**FIT)
    own, expected = trainer.model.optimizer, plain.optimizer
    np.testing.assert_allclose(own.norms["mean"], expected.norms["mean"], rtol=1e-5)
    np.testing.assert_allclose(own.learning_rate, expected.learning_rate, rtol=1e-5)
    np.testing.assert_allclose(own.inner.momentums[0], expected.inner.momentums[0], rtol=1e-4)


class Scaled(keras.optimizers.SGD):
    """Has no `get_config`."""

    def __init__(self, learning_rate: float = 0.1, factor: float = 1.0, **options: Any) -> None:
        super().__init__(learning_rate, **options)
        self.factor = factor


def test_a_compiled_model_is_refused_if_a_copy_would_lose_something() -> None:
    model = building(lambda: Scaled(factor=0.5))()
    with pytest.raises(UnsupportedModelError, match=r"Scaled.factor would be lost"):
        Trainer(model, "mirrored", devices=2)
    model = building(lambda: keras.optimizers.SGD(0.1))()
    model.train_step = lambda data: {"loss": tf.constant(0.0)}
    with pytest.raises(UnsupportedModelError, match=r"Functional.train_step would be lost"):
        Trainer(model, "mirrored", devices=2)


def test_a_distributed_dataset_is_refused() -> None:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(5)
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    trainer = Trainer(building(lambda: keras.optimizers.SGD(0.1)), "one_device")
    with pytest.raises(DataError, match=r"Pass the plain tf\.data"):
        trainer.fit(strategy.experimental_distribute_dataset(data), verbose=0)


def test_a_function_for_batches_that_is_set_on_the_model_is_refused() -> None:
    trainer = Trainer(building(lambda: keras.optimizers.SGD(0.1)), "one_device")
    trainer.model.train_function = lambda iterator: {}
    with pytest.raises(UnsupportedModelError, match=r"train_function is set to a function"):
        trainer.fit(**FIT)
