"""Rematerialized layers and offloaded activations give the same results as activations kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.conformance.layouts import AnsweringPool, Layout
from tests.support.training import FIT, X, assert_close, build
from tfdist.errors import ConfigurationError, UnsupportedModelError
from tfdist.patches.offload import ON_HOST
from tfdist.patches.remat import chosen
from tfdist.precision import LossScale
from tfdist.strategies import create
from tfdist.tools.plan.devices import ReplicatedStep
from tfdist.tools.plan.network import Network
from tfdist.trainer import Trainer

LONG = pytest.mark.long
#: Combined with all other options that change how a batch is computed.
WITH_MORE: dict[str, Any] = {
    "precision": "mixed_float16", "loss_scale": LossScale.fixed(64.0), "accumulate": 2
}  # fmt: skip
#: With these, each micro-batch has a row on both processes, and every layer is sharded.
OPTIONS: dict[str, dict[str, int]] = {
    "pipeline": {"micro_batches": 3},
    "tensor_parallel": {"smallest": 1},
    "sharded": {"smallest": 1},
}
RANDOM = np.random.default_rng(0)
IDS = RANDOM.integers(1, 9, (15, 6)).astype("int32")
IDS[::3, 2:] = 0


class Block(layers.Layer):
    """Two dense layers, dropout, a penalty, and moving statistics."""

    def __init__(self, units: int, **options: Any) -> None:
        super().__init__(**options)
        # Keras cannot add a float16 penalty to a float32 loss.
        penalty = "l2" if self.compute_dtype == "float32" else None
        self.up = layers.Dense(2 * units, "gelu", activity_regularizer=penalty)
        # Its factor of 2 is exact in float16, wherever the graph optimizer multiplies by it.
        self.drop = layers.Dropout(0.5, seed=5)
        self.norm = layers.BatchNormalization(momentum=0.5)
        self.down = layers.Dense(units)

    def build(self, shape: tuple[int, ...]) -> None:
        self.up.build(shape)
        self.down.build((*shape[:-1], self.up.units))
        self.norm.build((*shape[:-1], self.down.units))

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return self.norm(self.down(self.drop(self.up(inputs)))) + inputs


def blocks(mode: str | None = None) -> keras.Model:
    """A model of custom and random layers."""
    keras.utils.set_random_seed(1)
    with keras.RematScope(mode=mode):
        stack = [Block(4, name="first"), layers.Dropout(0.5, seed=2), Block(4, name="second")]
        model = keras.Sequential(
            [keras.Input((4,)), *stack, layers.Dense(1, "sigmoid", dtype="float32")]
        )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=1.0), "binary_crossentropy")
    return model


def text() -> keras.Model:
    """Masks, a recurrent layer, attention heads with dropout, and probabilities."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,), dtype="int32")
    hidden = layers.Embedding(9, 8, mask_zero=True)(inputs)
    hidden = hidden + layers.MultiHeadAttention(2, 4, dropout=0.2, seed=7)(hidden, hidden)
    hidden = layers.LSTM(8, return_sequences=True)(hidden)
    model = keras.Model(inputs, layers.Dense(9, activation="softmax", dtype="float32")(hidden))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
    return model


def trained(
    make: Any,
    strategy: str = "one_device",
    recompute: str = "none",
    devices: int = 2,
    **options: Any,
) -> Any:
    """Returns the weights of the trained model, its history and its evaluation."""
    num_devices = None if strategy == "one_device" else devices
    trainer = Trainer(
        make,
        create(strategy, num_devices, **OPTIONS.get(strategy, {})),
        recompute=recompute,
        **options,
    )
    rows = {"x": IDS, "y": IDS} if make is text else {"x": X, "y": np.float32(FIT["y"] > 0)}
    rows["y"] = rows["y"] if make is text else rows["y"][:, :1]
    fit = {"batch_size": 7, "shuffle": False, "verbose": 0}
    history = trainer.fit(**rows, **fit, epochs=2).history
    return trainer.model.get_weights(), history, trainer.evaluate(**rows, verbose=0)


without_remat = functools.cache(trained)


@pytest.mark.parametrize(
    ("strategy", "make"),
    [
        ("one_device", blocks),
        ("mirrored", blocks),
        *(
            pytest.param(strategy, blocks, marks=LONG)
            for strategy in (
                "central_storage", "towers", "pipeline", "tensor_parallel", "sharded",
            )
        ),
        pytest.param("mirrored", text, marks=LONG),
    ],
)  # fmt: skip
def test_equals_training_without_remat(strategy: str, make: Any) -> None:
    assert_close(trained(make, strategy, "all"), without_remat(make, strategy))


def called_twice() -> keras.Model:
    """A layer that is called on its own output."""
    keras.utils.set_random_seed(1)
    dense = layers.Dense(4, "gelu")
    stack = [keras.Input((4,)), layers.Dense(4), dense, layers.Dropout(0.0), dense, layers.Dense(1)]
    model = keras.Model(stack[0], functools.reduce(lambda x, layer: layer(x), stack))
    model.compile(keras.optimizers.SGD(0.5), "mse")
    return model


def test_layer_that_is_called_twice_has_the_gradients_of_both_calls() -> None:
    plain = called_twice()
    plain.fit(**FIT)
    trainer = Trainer(called_twice, "one_device", remat="all")
    trainer.fit(**FIT)
    assert_close(trainer.model.get_weights(), plain.get_weights())


@pytest.mark.parametrize(
    ("strategy", "make"),
    [
        ("one_device", blocks),
        ("mirrored", blocks),
        *(pytest.param(strategy, blocks, marks=LONG) for strategy in OPTIONS),
        *(pytest.param(strategy, text, marks=LONG) for strategy in OPTIONS),
    ],
)
def test_remat_with_accumulation_and_mixed_precision(strategy: str, make: Any) -> None:
    found, expected = (
        trained(make, strategy, recompute, **WITH_MORE) for recompute in ("all", "none")
    )
    assert_close(found, expected)
    losses = found[1]["loss"]
    assert losses[1] < 0.999 * losses[0]  # no step was skipped


@LONG
@pytest.mark.processes
@pytest.mark.parametrize(
    "layout",
    [
        Layout("horovod", 2),
        Layout("multi_worker", 2),
        Layout("sharded", 2),
        Layout("pipeline", 2, num_devices=2),
        Layout("tensor_parallel", 2, num_devices=2),
    ],
    ids=str,
)
def test_remat_over_processes_matches_one_device(layout: Layout) -> None:
    with AnsweringPool(layout, create_training, layout.strategy, layout.num_devices) as pool:
        for make, options in (("blocks", WITH_MORE), ("text", {})):
            answers = [pool.ask(make, recompute, options) for recompute in ("all", "none")]
            for found, expected in zip(*answers, strict=True):
                assert not found.error + expected.error
                assert_close(found.value, expected.value)


def create_training(strategy: str, devices: int) -> Callable[..., Any]:
    """Returns a function that trains a model of this module, given its name."""

    def answer(make: str, recompute: str, options: dict[str, Any]) -> Any:
        return trained(globals()[make], strategy, recompute, devices, **options)

    return answer


class OwnDense(layers.Dense):
    """May do more than a `Dense`."""


def test_all_means_layers_whose_tensors_their_neighbors_do_not_keep() -> None:
    kept = [
        layers.Conv2D(4, 3, activation="relu"), layers.BatchNormalization(), layers.ReLU(),
        layers.MaxPooling2D(), layers.Flatten(), layers.Dense(4, "tanh"),
    ]  # fmt: skip
    recomputed = [
        layers.Dense(4, "gelu"), layers.LayerNormalization(), layers.Dropout(0.1), OwnDense(4),
        layers.Dense(4, layers.PReLU()),
    ]  # fmt: skip
    model = keras.Sequential([keras.Input((8, 8, 3)), *kept, *recomputed])
    assert chosen(model, "all") == recomputed
    assert chosen(model, "relu|re_lu") != []


def test_remat_scope_in_build_model_is_honored() -> None:
    result = trained(lambda: blocks("full"))
    assert_close(result, without_remat(blocks, "one_device"))


def test_unsupported_remat_raises() -> None:
    with pytest.raises(ConfigurationError, match="matches none of the layers "):
        Trainer(build, recompute="nothing").fit(**FIT)
    with pytest.raises(ConfigurationError, match="a regular expression that finds"):
        Trainer(build, recompute="(")

    class Assigns(layers.Dense):
        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            self.kernel.assign(self.kernel * 0.5)
            return super().call(inputs)

    def make() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), Assigns(1, name="assigns")])
        model.compile("sgd", "mse")
        return model

    with pytest.raises(UnsupportedModelError, match=r"'assigns' cannot be rematerialized.*kernel"):
        Trainer(make, "one_device", recompute="all").fit(**FIT)


# ---- activations on the host ----

SEQUENCES = RANDOM.normal(size=(48, 8, 4)).astype("float32"), RANDOM.normal(size=(48, 3))


def mixed_layers(**options: Any) -> keras.Model:
    """Returns a compiled model with attention, dropout, moving statistics and a loop."""
    keras.utils.set_random_seed(1)
    x = inputs = keras.Input((8, 4))
    x = layers.Dense(32, "gelu")(x)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 16, dropout=0.1)(x, x))
    x = layers.BatchNormalization()(layers.Dense(32, "relu")(layers.Dropout(0.2)(x)))
    model = keras.Model(inputs, layers.Dense(3)(layers.LSTM(16)(x)))
    model.compile("sgd", "mse", **options)
    return model


class OwnStep(keras.Model):
    """A model with a custom train_step."""

    def train_step(self, data: Any) -> dict[str, Any]:
        """Trains as Keras does."""
        return super().train_step(data)


def custom() -> keras.Model:
    """Returns a compiled model with a custom step."""
    inputs = keras.Input((8, 4))
    model = OwnStep(inputs, layers.Dense(3)(layers.Flatten()(inputs)))
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("one_device", {}),
        pytest.param("mirrored", {"accumulate": 2}, marks=pytest.mark.long),
        pytest.param("sharded", {"remat": "dense"}, marks=pytest.mark.long),
    ],
)
def test_numbers_are_the_same(strategy: str, options: dict[str, Any]) -> None:
    names = ["CPU:1"] if strategy == "one_device" else ["CPU:1", "CPU:2"]
    results = []
    for offloads in (False, True):
        trainer = Trainer(mixed_layers, strategy, names, offload_activations=offloads, **options)
        trainer.fit(*SEQUENCES, batch_size=16, epochs=2, verbose=0)
        results.append(trainer.model.get_weights())
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "network",
    [
        Network("mlp", (64,), 10, settings={"units": (64,) * 12}),
        # Its gradients are reshaped by constants.
        pytest.param(Network("gpt", (64,), 16, settings={"size": "tiny"}), marks=LONG),
    ],
)
def test_activations_leave_the_device(network: Network) -> None:
    kept = ReplicatedStep(network)
    moved = ReplicatedStep(network, offload_activations=True)
    variables = kept.weights + kept.gradients + kept.optimizer
    # Of all layers, those that the backward pass reads first and on their way.
    assert moved.peak(16384) - variables < 0.7 * (kept.peak(16384) - variables)
    copied = [name for name in moved._graph.order if ON_HOST in name and "Receive" not in name]
    assert len(copied) >= 8


def test_steps_that_place_tensors_themselves_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="needs a graph"):
        Trainer(lambda: mixed_layers(run_eagerly=True), offload_activations=True).fit(
            *SEQUENCES, verbose=0
        )
    for make in (lambda: mixed_layers(jit_compile=True), custom):
        with pytest.raises(ConfigurationError, match="offload_activations does not apply to"):
            Trainer(make, offload_activations=True, verify="off").fit(*SEQUENCES, verbose=0)
