"""What a message says to do is done, and the training runs."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.support.classifier import LABELS, X, build, fit, network
from tests.support.starting import launch, program
from tests.support.training import Y, building, dataset, mirrored
from tfdist import schedules
from tfdist.cluster import Cluster
from tfdist.config import TrainConfig
from tfdist.errors import ClusterError, TfdistError
from tfdist.groups.collective import _tf_strategy
from tfdist.precision import LossScale
from tfdist.strategies.mirrored import Mirrored

OPTIMIZER = keras.optimizers.SGD(0.1)


def compiled_with(make_optimizer: Callable[[], keras.optimizers.Optimizer]) -> keras.Model:
    model = network()
    model.compile(make_optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Named(keras.Model):
    """Compiled in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.out = layers.Dense(3)

    def compile(self, rate: float) -> None:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        super().compile(keras.optimizers.SGD(rate), loss)

    def call(self, inputs: Any) -> Any:
        return self.out(inputs)


def named() -> keras.Model:
    model = Named()
    model.compile(0.1)
    model.build((None, 4))
    return model


class Stepped(keras.Sequential):
    """Has a step of its own."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def stepped(**options: Any) -> keras.Model:
    model = Stepped([keras.Input((4,)), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, **options), "mse")
    return model


def normalised(jit_compile: bool) -> Callable[[], keras.Model]:
    made = [layers.BatchNormalization(), layers.Dense(3)]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return building(lambda: [keras.Input((4,)), *made], loss=loss, jit_compile=jit_compile)


class BothWays(layers.Layer):
    """Looks up what the rows hold, and the same entries for all, in one table."""

    def __init__(self, two_ways: bool) -> None:
        super().__init__()
        self.two_ways = two_ways

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(5, 3))

    def call(self, tokens: Any) -> Any:
        places = keras.ops.arange(3)
        own = keras.ops.take(self.table, tokens, axis=0)
        if self.two_ways:
            return own + keras.ops.take(self.table, places, axis=0)
        return own + keras.ops.one_hot(places, 5) @ self.table


def looked_up(two_ways: bool) -> tfdist.Trainer:
    tokens = (X[:, :3] > 0).astype("int32")
    made = [keras.Input((3,), dtype="int32"), BothWays(two_ways), layers.Flatten()]
    return fit(building(lambda: [*made, layers.Dense(1)]), tokens)


def grown(in_scope: bool) -> tfdist.Trainer:
    trainer = fit()
    if in_scope:
        with trainer.strategy.scope():
            trainer.model.add(layers.Dense(3))
    else:
        with tf.device("CPU:1"):
            trainer.model.add(layers.Dense(3))
    trainer.model.compile("sgd", trainer.model.loss)
    trainer.fit(X, LABELS, batch_size=4, verbose=0)
    return trainer


UNKNOWN = TrainConfig(lr_rule="cosine"), TrainConfig(lr_rule="constant", warmup_epochs=0)

#: What is wrong, words of its message, and what they say to do.
CURES: dict[str, tuple[Callable[[], Any], str, Callable[[], Any]]] = {
    "optimizer of another": (
        lambda: [fit(lambda: compiled_with(lambda: OPTIMIZER)) for _ in range(2)],
        "create the optimizer inside build_model",
        lambda: [fit(lambda: compiled_with(keras.optimizers.SGD)) for _ in range(2)],
    ),
    "overrides compile": (
        lambda: fit(named()),
        "pass a function that builds .*it instead of the model",
        lambda: fit(named),
    ),
    "XLA across an exchange": (
        lambda: fit(normalised(jit_compile=True), sync_batch_norm=True),
        "Compile the model with jit_compile=False",
        lambda: fit(normalised(jit_compile=False), sync_batch_norm=True),
    ),
    "precision of a model": (
        lambda: fit(build(), precision="mixed_bfloat16"),
        "pass the function that builds it",
        lambda: fit(build, precision="mixed_bfloat16"),
    ),
    "odd number of devices": (
        lambda: Mirrored(3, all_reduce="hierarchical_copy"),
        "an even number, or all_reduce='auto'",
        lambda: (Mirrored(2, all_reduce="hierarchical_copy"), Mirrored(3, all_reduce="auto")),
    ),
    "rounds of a whole step": (
        lambda: mirrored(stepped, accumulate=2).fit(X, Y[:12], batch_size=4, verbose=0),
        "Set gradient_accumulation_steps of its optimizers",
        lambda: mirrored(functools.partial(stepped, gradient_accumulation_steps=2)).fit(
            X, Y[:12], batch_size=4, verbose=0
        ),
    ),
    "table looked up both ways": (
        lambda: looked_up(two_ways=True),
        r"keras\.ops\.one_hot and a matrix product",
        lambda: looked_up(two_ways=False),
    ),
    "batch of fewer rows than replicas": (
        lambda: mirrored().fit(X, Y[:12], batch_size=1, verbose=0),
        "use batch_size=2 or more",
        lambda: mirrored().fit(X, Y[:12], batch_size=2, verbose=0),
    ),
    "loss scale that is a number": (
        lambda: fit(loss_scale=128),
        r"LossScale\.fixed\(128\.0\)",
        lambda: fit(loss_scale=LossScale.fixed(128.0)),
    ),
    "rule of an unknown length": (
        lambda: schedules.learning_rate(UNKNOWN[0], None),
        "--lr-rule constant --warmup-epochs 0",
        lambda: schedules.learning_rate(UNKNOWN[1], None),
    ),
}


@pytest.mark.parametrize("name", CURES)
def test_cure_lets_it_train(name: str) -> None:
    mistake, says, cure = CURES[name]
    with pytest.raises(TfdistError, match=says):
        mistake()
    cure()


def test_data_that_end_early_are_repeated() -> None:
    with pytest.warns(UserWarning, match=r"use \.repeat\(\) on the data set"):
        mirrored().fit(dataset(), steps_per_epoch=9, verbose=0)
    trainer = mirrored()
    trainer.fit(dataset().repeat(), steps_per_epoch=9, verbose=0)
    assert int(trainer.model.optimizer.iterations) == 9


def test_workers_join_before_tensorflow_starts(tmp_path: Path) -> None:
    two = Cluster("test", rank=0, size=2, addresses=("localhost:1", "localhost:2"))
    with pytest.raises(ClusterError, match="can no longer join") as refused:
        _tf_strategy(("CPU:0",), "ring", two)
    (cure,) = re.findall(r"call (tfdist\S+) before", str(refused.value))
    body = f"""
import tfdist
strategy = {cure}
from tests.support.classifier import LABELS, X, build
trainer = tfdist.Trainer(build(), strategy)
trainer.fit(X, LABELS, batch_size=4, verbose=0)
print(trainer.strategy.num_replicas, "replicas")
"""
    done = launch("--", sys.executable, program(tmp_path, body), cwd=tmp_path)
    assert sorted(done.stdout.splitlines()) == ["[0] 2 replicas", "[1] 2 replicas"], done.stderr
