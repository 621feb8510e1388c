"""XLA: what `jit_compile="auto"` means on a host with GPUs, and what XLA compiles of a step."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.gpu_paths.step_graph import batches, step_graphs
from tests.support.training import assert_trains_as_keras, building, mirrored
from tfdist.strategies import Strategy
from tfdist.strategies.mirrored import Mirrored
from tfdist.strategies.one_device import OneDevice
from tfdist.upstream.patching import replaced

_weighted = functools.partial(keras.losses.MeanSquaredError, reduction="mean_with_sample_weight")
_sgd = functools.partial(keras.optimizers.SGD, 0.1, momentum=0.9)
#: Operations of forward and backward pass, of the check for overflows, and of the update.
_COMPUTING = {"MatMul", "Relu", "Mul", "RealDiv", "IsFinite", "ResourceApplyKerasMomentum"}
_DENSE = [keras.Input((4, 4, 1)), layers.Flatten, lambda: layers.Dense(1)]
_CONVOLUTION = [keras.Input((4, 4, 1)), lambda: layers.Conv2D(2, 3), layers.Flatten]


@contextmanager
def gpus_of_keras() -> Iterator[None]:
    """Lets Keras, which lists devices of all kinds, see a GPU; tfdist sees none."""
    plain = tf.config.list_physical_devices
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    with replaced(
        tf.config, "list_physical_devices", lambda kind=None: plain(kind) + [gpu] * (kind is None)
    ):
        yield


@pytest.mark.parametrize(
    ("strategy", "kinds", "options", "uses_xla"),
    [
        ("one_device", _DENSE, {}, True),
        ("one_device", _CONVOLUTION, {}, False),
        ("one_device", _CONVOLUTION, {"jit_compile": True}, True),
        ("one_device", _DENSE, {"jit_compile": False}, False),
        ("mirrored", _DENSE, {}, False),
    ],
)
def test_auto_is_xla_as_in_keras_but_not_for_convolutions(
    strategy: str, kinds: list[Any], options: dict[str, bool], uses_xla: bool
) -> None:
    build = building(
        lambda: [kinds[0], *(kind() for kind in kinds[1:])], optimizer="sgd", **options
    )
    with gpus_of_keras():
        trainer = tfdist.Trainer(build, strategy=strategy)
        assert trainer.model.jit_compile == uses_xla
        trainer.model.compile("sgd", "mse", **options)  # again, outside of the builder
    assert trainer.model.jit_compile == uses_xla
    assert trainer.describe()["XLA"] == ("the whole step" if uses_xla else "no")
    with gpus_of_keras():  # rounds may exchange sums
        accumulating = tfdist.Trainer(build, strategy=strategy, accumulate=2)
    assert accumulating.model.jit_compile is options.get("jit_compile", False)


def build_layers() -> list:
    """Returns a network of some weights with BatchNorm."""
    dense = (lambda: layers.Dense(4, "relu"), layers.BatchNormalization) * 3
    return [keras.Input((4,)), *(make() for make in dense), layers.Dense(1)]


class Custom(keras.Sequential):
    def train_step(self, data: tuple) -> dict[str, Any]:
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            scaled = self.optimizer.scale_loss(self.compute_loss(y=data[1], y_pred=self(data[0])))
        self.optimizer.apply(tape.gradient(scaled, weights), weights)
        return {}


@pytest.mark.parametrize(
    ("make", "model", "num_programs"),
    [
        *itertools.product((OneDevice, lambda: Mirrored(1)), (keras.Sequential, Custom), (1,)),
        (lambda: Mirrored(2), keras.Sequential, 4),
    ],
)
def test_a_step_is_one_program_or_two_per_replica(
    make: type[Strategy], model: type[keras.Sequential], num_programs: int
) -> None:
    """Of several replicas, one until the all-reduce of few tensors, and one for the update."""
    build = building(lambda: model(build_layers()), optimizer=_sgd, jit_compile=True)
    graphs = step_graphs(make(), build, batches().repeat(), 4, precision="mixed_float16")
    whole = graphs.traced.as_graph_def()
    functions = {function.signature.name: function for function in whole.library.function}
    programs, inside, outside = 0, set(), set()
    stack = [(node, False) for node in whole.node]
    while stack:
        node, is_inside = stack.pop()
        if node.attr["_XlaMustCompile"].b and not is_inside:
            programs, is_inside = programs + 1, True
        (inside if is_inside else outside).add(node.op)
        called = [attribute.func.name for attribute in node.attr.values() if attribute.func.name]
        stack += [(one, is_inside) for name in called for one in functions[name].node_def]
    assert programs == num_programs
    assert inside >= _COMPUTING - ({"ResourceApplyKerasMomentum"} if model is Custom else set())
    assert not _COMPUTING & outside
    assert "If" not in inside  # a skipped step is no branch


@pytest.mark.parametrize("strategy", ["one_device", "mirrored"])
def test_skipped_steps_are_selected(strategy: str) -> None:
    """An overflow changes nothing but the scale, without a branch."""
    build = building(
        lambda: [keras.Input((4,)), layers.Dense(4), layers.Dense(1)],
        optimizer=_sgd,
        jit_compile=True,
    )
    devices = 1 if strategy == "one_device" else 2
    trainer = tfdist.Trainer(build, strategy, devices=devices, precision="mixed_float16")
    x, y = np.eye(8, 4, dtype="float32"), np.ones((8, 1), "float32")
    fit = {"batch_size": 8, "verbose": 0}
    skipped = trainer.fit(x, y, **fit).history["skipped_steps"][0]
    trained = [v.numpy() for v in trainer.model.trainable_variables]
    count = int(trainer.model.optimizer.iterations)
    logs = trainer.fit(x, np.where(np.arange(8)[:, None] > 6, np.inf, y), **fit).history
    assert logs["skipped_steps"] == [skipped + 1]
    assert int(trainer.model.optimizer.iterations) == count
    for variable, before in zip(trainer.model.trainable_variables, trained, strict=True):
        np.testing.assert_array_equal(variable, before)
    trainer.fit(x, y, **fit)
    assert int(trainer.model.optimizer.iterations) == count + 1


@pytest.mark.parametrize(
    ("make", "compiling", "options"),
    [
        (layers.BatchNormalization, {}, {"sync_batch_norm": True}),
        (layers.ReLU, {"loss": _weighted()}, {"accumulate": 2}),
    ],
)
def test_replicas_that_need_each_other_are_not_in_xla(
    make: Callable[[], keras.Layer], compiling: dict[str, Any], options: dict[str, Any]
) -> None:
    """Within the forward and backward pass, sums are exchanged."""
    build = building(
        lambda: [keras.Input((4,)), make(), layers.Dense(1)],
        optimizer=_sgd, jit_compile=True, **compiling,
    )  # fmt: skip
    x, y = np.random.default_rng(0).normal(size=(2, 15, 4)).astype("float32")
    fit = {"x": x, "y": y[:, :1], "sample_weight": y[:, 1] ** 2, "batch_size": 7, "verbose": 0}
    trainer = mirrored(build, **options)
    with pytest.warns(UserWarning, match="jit_compile=True is ignored in the forward"):
        assert_trains_as_keras(trainer, build(), **fit, shuffle=False)
    assert trainer.describe()["XLA"] == "the update"


def test_partial_batches_are_not_traced_again() -> None:
    """XLA compiles once for each size of a batch, not in each epoch; TensorFlow traces once."""
    x, y = np.ones((11, 4), "float32"), np.ones((11, 1), "float32")
    calls: list[int] = []
    for jit_compile in (False, True):
        counter = _Counter()
        build = building(
            lambda counter=counter: [keras.Input((4,)), counter, layers.Dense(1)],
            optimizer=_sgd,
            jit_compile=jit_compile,
        )
        tfdist.Trainer(build, "one_device").fit(x, y, batch_size=4, epochs=3, verbose=0)
        calls.append(counter.num_calls)
    assert calls[0] == calls[1]


class _Counter(layers.Layer):
    """Counts how often it is traced."""

    num_calls = 0

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        self.num_calls += 1
        return inputs
