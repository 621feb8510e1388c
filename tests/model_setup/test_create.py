"""Models and their compilation are created in a strategy's scope with all their state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.support.case import compiled, mlp
from tests.support.training import (
    FIT,
    X,
    Y,
    assert_close,
    assert_same_weights,
    build,
    mirrored,
    steps,
)
from tfdist.errors import ConfigurationError, UnsupportedModelError
from tfdist.model_setup import build as build_missing
from tfdist.model_setup import create
from tfdist.precision import LossScale
from tfdist.strategies.mirrored import Mirrored
from tfdist.trainer import Trainer


@pytest.fixture(scope="module")
def strategy() -> Mirrored:
    return Mirrored(2)


def squared(y_true: Any, y_pred: Any) -> Any:
    """A loss and metric that is not registered."""
    return ops.mean((y_true - y_pred) ** 2, -1)


class Gate(layers.Layer):
    """A layer that is not registered."""

    def call(self, inputs: Any) -> Any:
        return inputs * 2.0


class Network(keras.Model):
    """A subclassed model with `get_config`."""

    def __init__(self, units: int = 3) -> None:
        super().__init__()
        self.units = units
        self.hidden, self.head = layers.Dense(units), layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.head(self.hidden(inputs))

    def get_config(self) -> dict[str, Any]:
        return {"units": self.units}


class WithoutConfig(keras.Model):
    """A subclassed model without `get_config`."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.head = layers.Dense(units)

    def call(self, inputs: Any) -> Any:
        return self.head(inputs)


def functional() -> keras.Model:
    """Two inputs, a layer used twice, a nested model, and custom layers."""
    inputs = [keras.Input((4,)), keras.Input((4,))]
    shared = keras.Sequential([layers.Dense(3), layers.BatchNormalization()])
    joined = layers.Concatenate()([Gate()(shared(i)) for i in inputs])
    return keras.Model(inputs, layers.Dense(1)(joined))


def partly_frozen() -> keras.Model:
    model = mlp()
    model.layers[0].trainable = False
    return model


def subclassed() -> keras.Model:
    model = Network(5)
    model(X)
    return model


@pytest.mark.parametrize("make", [mlp, functional, partly_frozen, subclassed])
def test_rebuilds_a_model(make: Callable[[], keras.Model], strategy: Mirrored) -> None:
    model = compiled(make(), loss=squared, metrics=[squared, keras.metrics.MeanSquaredError()])
    x = [X, X + 1] if make is functional else X
    model.fit(x, Y, batch_size=5, verbose=0)
    rebuilt = create.create(model, strategy)
    assert all(
        strategy.variables.owns(v.value) for v in rebuilt.variables + rebuilt.optimizer.variables
    )
    assert_same_weights(rebuilt, model)
    assert len(rebuilt.trainable_variables) == len(model.trainable_variables)
    assert steps(rebuilt) == 3
    assert_close(rebuilt(x).numpy(), model(x).numpy())


def test_keeps_compile_options(strategy: Mirrored) -> None:
    options = {"loss_weights": [0.5], "steps_per_execution": 3, "run_eagerly": True}
    rebuilt = create.create(build(weighted_metrics=["mae"], **options), strategy)
    assert rebuilt.steps_per_execution == 3
    assert rebuilt.run_eagerly
    assert rebuilt._compile_config.config["loss_weights"] == [0.5]
    assert rebuilt._compile_config.config["weighted_metrics"] == ["mae"]


class Falling(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule without a config."""

    def __call__(self, step: Any) -> Any:
        return 0.1 / (1.0 + tf.cast(step, tf.float32))


@pytest.mark.parametrize(
    "schedule", [keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), Falling()]
)
def test_keeps_schedule_and_momentum(strategy: Mirrored, schedule: Any) -> None:
    model = build(keras.optimizers.SGD(schedule, momentum=0.9))
    model.fit(**FIT)
    rebuilt = create.create(model, strategy)
    found, wanted = rebuilt.optimizer.variables, model.optimizer.variables
    assert [v.path for v in found] == [v.path for v in wanted]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    assert_close(rebuilt.optimizer.learning_rate.numpy(), model.optimizer.learning_rate.numpy())


def test_keeps_the_loss_scale(strategy: Mirrored) -> None:
    inner = keras.optimizers.SGD(0.1)
    scaled = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0, dynamic_growth_steps=2)
    model = build(scaled)
    model.fit(**FIT)
    rebuilt = create.create(model, strategy)
    assert rebuilt.optimizer.dynamic_scale.numpy() == model.optimizer.dynamic_scale.numpy() == 16.0
    restarted = create.create(model, strategy, loss_scale=LossScale.fixed(32.0))
    assert restarted.optimizer.dynamic_scale.numpy() == 32.0
    assert type(restarted.optimizer.inner_optimizer) is keras.optimizers.SGD


def adamw() -> keras.Model:
    """Returns a trained model whose biases have no weight decay."""
    optimizer = keras.optimizers.AdamW(0.05, weight_decay=0.5, epsilon=1e-2)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    model = build(optimizer)
    model.fit(**FIT)
    return model


def frozen_since() -> keras.Model:
    model = adamw()
    model.layers[0].trainable = False
    return compiled(model, model.optimizer)


def test_continues_training_of_plain_keras(strategy: Mirrored, tmp_path: Path) -> None:
    adamw().save(tmp_path / "model.keras")

    def loaded() -> keras.Model:
        return keras.models.load_model(tmp_path / "model.keras")

    for make in (adamw, frozen_since, loaded):
        trainer, plain = Trainer(make(), strategy), make()
        trainer.fit(**FIT)
        plain.fit(**FIT)
        assert_same_weights(trainer.model, plain)
        both = trainer.model.optimizer.variables, plain.optimizer.variables
        for one, other in zip(*both, strict=True):
            assert_close(one.numpy(), other.numpy())


def adapted_numbers() -> keras.layers.Layer:
    layer = layers.Normalization()
    layer.adapt(X * 3 + 1)
    return layer


def adapted_words() -> keras.layers.Layer:
    layer = layers.StringLookup(output_mode="multi_hot")
    layer.adapt([["a", "b"], ["a", "c"]])
    return layer


@pytest.mark.parametrize(
    ("make", "x"), [(adapted_numbers, X), (adapted_words, tf.constant([["b", "a"], ["d", "c"]]))]
)
def test_keeps_adapted_state_of_layers(
    make: Callable[[], keras.layers.Layer], x: Any, strategy: Mirrored
) -> None:
    """Also in a model that is not built yet."""
    layer = make()
    (rebuilt,) = create.create(compiled(keras.Sequential([layer])), strategy).layers
    assert_close(rebuilt(x).numpy(), layer(x).numpy())


def test_built_layers_in_an_unbuilt_model_keep_their_weights(strategy: Mirrored) -> None:
    built = layers.Dense(3)
    built.build((None, 4))
    model = create.create(compiled(keras.Sequential([built, layers.Dense(1)])), strategy)
    assert not model.built
    assert_same_weights(model.layers[0], built)


def test_optimizer_of_another_model_raises(strategy: Mirrored) -> None:
    trained, other = build(), mlp()
    trained.fit(**FIT)
    with pytest.raises(ConfigurationError, match="built for weights that the model does not have"):
        create.create(compiled(other, trained.optimizer), strategy)


def test_model_without_config_raises(strategy: Mirrored) -> None:
    model = compiled(WithoutConfig(1))
    model(X)
    message = r"WithoutConfig cannot .* pass a function that"
    with pytest.raises(UnsupportedModelError, match=message):
        create.create(model, strategy)
    assert model.compiled


class Block(keras.Model):
    """A class that creates its own inputs and outputs, as those of KerasHub do."""

    def __init__(self, units: int, **options: Any) -> None:
        inputs = keras.Input((4,))
        hidden = layers.Dense(units, name="hidden")(inputs)
        super().__init__(inputs, layers.Dense(1, name="head")(hidden), **options)
        self.units = units

    def compile(self, rate: float, rule: str = "sgd", **options: Any) -> None:
        super().compile(keras.optimizers.get({"class_name": rule, "config": {}}), "mse", **options)
        self.optimizer.learning_rate = rate
        self.rate, self.rule = rate, rule

    def get_config(self) -> dict[str, Any]:
        return {"units": self.units, "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Block:
        return cls(**config)


def changed(quantized: str | None, lora: int, frozen: bool) -> Block:
    """Returns a block that was changed after its construction."""
    model = Block(6)
    hidden, head = model.get_layer("hidden"), model.get_layer("head")
    if quantized:
        hidden.quantize(quantized)
    if lora:
        hidden.enable_lora(lora, lora_alpha=3)
    head.trainable = not frozen
    model.compile(0.25, jit_compile=False)
    return model


@pytest.mark.parametrize(
    ("quantized", "lora", "frozen"),
    [(None, 2, True), ("int8", 2, False), ("int4", 2, True), ("float8", 0, True)],
)
def test_rebuilds_what_construction_does_not_know(
    strategy: Mirrored, quantized: str | None, lora: int, frozen: bool
) -> None:
    model = changed(quantized, lora, frozen)
    rebuilt = create.create(model, strategy)
    assert type(rebuilt) is Block
    assert rebuilt.rate == 0.25
    assert float(rebuilt.optimizer.learning_rate.numpy()) == 0.25
    names = [{v.path for v in one.trainable_variables} for one in (model, rebuilt)]
    assert names[0] == names[1]
    np.testing.assert_array_equal(rebuilt(X[:, :4]).numpy(), model(X[:, :4]).numpy())


class WithoutArguments(keras.Model):
    """A class as in Keras's guides, without the arguments `trainable` and `dtype`."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.out = layers.Dense(3), layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.out(self.dense(inputs))


class WithSetOfLayers(keras.Model):
    """A class with an argument that no configuration can hold."""

    def __init__(self, parts: set[Any]) -> None:
        super().__init__()
        self.parts = list(parts)

    def call(self, inputs: Any) -> Any:
        return self.parts[0](inputs)


def test_rebuilds_a_class_without_keyword_arguments(strategy: Mirrored) -> None:
    model = WithoutArguments()
    model.compile("sgd", "mse")
    model(X)
    rebuilt = create.create(model, strategy)
    assert rebuilt is not model
    assert_same_weights(rebuilt, model)


def test_message_of_a_class_that_cannot_be_rebuilt_is_one_traceback(strategy: Mirrored) -> None:
    model = WithSetOfLayers({layers.Dense(1)})
    model.compile("sgd", "mse")
    with pytest.raises(UnsupportedModelError, match="WithSetOfLayers cannot be rebuilt") as caught:
        create.create(model, strategy)
    assert caught.value.__suppress_context__
    reason, _, fix = str(caught.value).partition("): ")
    assert reason.endswith("in order to be serializable")  # the whole sentence of Keras
    assert fix == "pass a function that builds it instead of the model."


def test_build_function_without_a_model_raises(strategy: Mirrored) -> None:
    with pytest.raises(ConfigurationError, match="returned NoneType, expected a compiled keras"):
        create.create(lambda: None, strategy)


def test_models_of_keras_2_are_refused(strategy: Mirrored) -> None:
    class Sequential:
        __module__ = "tf_keras.src.engine.sequential"

        def __call__(self, inputs: Any) -> Any:
            raise AssertionError

    for source in (Sequential(), lambda: Sequential()):
        with pytest.raises(ConfigurationError, match=r"Sequential of tf_keras \(Keras 2\)"):
            create.create(source, strategy)


def test_model_created_outside_the_scope_is_used_directly(strategy: Mirrored) -> None:
    model = build()
    assert create.create(lambda: model, strategy) is model


def test_rebuilds_models_with_distributed_variables(strategy: Mirrored) -> None:
    with strategy.tf_strategy.scope():
        distributed, optimizer = build(), keras.optimizers.SGD(0.1, momentum=0.9)
    with pytest.warns(UserWarning, match="compiled outside the strategy's scope"):
        model = create.create(lambda: build(optimizer), strategy)
    assert model.optimizer is not optimizer
    assert model.optimizer.get_config()["momentum"] == 0.9
    with pytest.warns(UserWarning, match="outside the strategy's scope. It is rebuilt"):
        rebuilt = create.create(lambda: distributed, strategy)
    assert_same_weights(rebuilt, distributed)
    assert all(
        strategy.variables.owns(v.value) for v in rebuilt.variables + model.optimizer.variables
    )


def test_xla_is_used_only_on_request(strategy: Mirrored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.Model, "_resolve_auto_jit_compile", lambda _: True)  # as on GPUs
    model = create.create(build, strategy)
    assert not model.jit_compile
    model.compile("sgd", "mse")
    assert not model.jit_compile
    model.compile("sgd", "mse", jit_compile=True)
    assert model.jit_compile
    assert build().jit_compile


def test_optimizer_built_for_other_weights_raises() -> None:
    optimizer = keras.optimizers.SGD(0.1)
    build(optimizer).fit(**FIT)
    with pytest.raises(ConfigurationError, match="was built for other weights"):
        mirrored(lambda: build(optimizer)).fit(**FIT)


def test_optimizer_of_another_trainer_raises_when_it_trains() -> None:
    optimizer = keras.optimizers.SGD(0.1)
    first, second = (mirrored(lambda: build(optimizer), precision="float16") for _ in range(2))
    second.evaluate(X, Y, verbose=0)  # which does not build the optimizer
    first.fit(**FIT)
    second.evaluate(X, Y, verbose=0)
    with pytest.raises(ConfigurationError, match="was built for other weights"):
        second.fit(**FIT)


class CreatesLayerInBuild(layers.Layer):
    """A layer that creates another one in `build`, with the global dtype policy."""

    def build(self, shape: Any) -> None:
        self.inner = layers.Dense(1)
        self.inner.build(shape)
        self.built = True

    def call(self, inputs: Any) -> Any:
        return self.inner(inputs)

    def compute_output_shape(self, shape: Any) -> Any:
        return (*shape[:-1], 1)


@pytest.mark.parametrize("first", ["fit", "predict"])
def test_layers_created_in_build_have_the_requested_precision(first: str) -> None:
    def build_model() -> keras.Model:
        return compiled(keras.Sequential([CreatesLayerInBuild()]))

    trainer = mirrored(build_model, precision="mixed_bfloat16")
    trainer.fit(**FIT) if first == "fit" else trainer.predict(X, verbose=0)
    assert trainer.model.layers[0].inner.compute_dtype == "bfloat16"
    assert keras.config.dtype_policy().name == "float32"


def test_weights_are_built_in_the_scope_from_shapes(strategy: Mirrored) -> None:
    model = create.create(lambda: compiled(Network()), strategy)
    spec = (tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1]))
    build_missing.build_for_training(model, strategy, spec)
    assert model.built
    assert model.optimizer.built
    assert all(
        strategy.variables.owns(v.value) for v in model.variables + model.optimizer.variables
    )
