"""Following the advice in an error message makes the training run."""

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

from tests.support.classifier import X, build, fit, network
from tests.support.starting import launch, program
from tests.support.training import Y, dataset, mirrored
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


class OverridesCompile(keras.Model):
    """A model that overrides `compile`."""

    def __init__(self) -> None:
        super().__init__()
        self.out = layers.Dense(3)

    def compile(self, rate: float) -> None:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        super().compile(keras.optimizers.SGD(rate), loss)

    def call(self, inputs: Any) -> Any:
        return self.out(inputs)


def overrides_compile() -> keras.Model:
    model = OverridesCompile()
    model.compile(0.1)
    model.build((None, 4))
    return model


class CustomStep(keras.Sequential):
    """A model with a custom `train_step`."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def custom_step(**options: Any) -> keras.Model:
    model = CustomStep([keras.Input((4,)), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, **options), "mse")
    return model


UNKNOWN = TrainConfig(lr_rule="cosine"), TrainConfig(lr_rule="constant", warmup_epochs=0)

#: By name: code that fails, a pattern of its message, and the code that the message suggests.
FIXES: dict[str, tuple[Callable[[], Any], str, Callable[[], Any]]] = {
    "optimizer of another trainer": (
        lambda: [fit(lambda: compiled_with(lambda: OPTIMIZER)) for _ in range(2)],
        "Compile the model with a new optimizer",
        lambda: [fit(lambda: compiled_with(keras.optimizers.SGD)) for _ in range(2)],
    ),
    "overrides compile": (
        lambda: fit(overrides_compile()),
        "pass a function that builds .*it instead of the model",
        lambda: fit(overrides_compile),
    ),
    "precision of a built model": (
        lambda: fit(build(), precision="mixed_bfloat16"),
        "Pass the function that builds it",
        lambda: fit(build, precision="mixed_bfloat16"),
    ),
    "odd number of devices": (
        lambda: Mirrored(3, all_reduce="hierarchical_copy"),
        "an even number, or all_reduce='auto'",
        lambda: (Mirrored(2, all_reduce="hierarchical_copy"), Mirrored(3, all_reduce="auto")),
    ),
    "accumulation with a custom train_step": (
        lambda: mirrored(custom_step, accumulate=2).fit(X, Y[:12], batch_size=4, verbose=0),
        "Set gradient_accumulation_steps of its optimizers",
        lambda: mirrored(functools.partial(custom_step, gradient_accumulation_steps=2)).fit(
            X, Y[:12], batch_size=4, verbose=0
        ),
    ),
    "loss scale as a number": (
        lambda: fit(loss_scale=128),
        r"LossScale\.fixed\(128\.0\)",
        lambda: fit(loss_scale=LossScale.fixed(128.0)),
    ),
    "schedule of unknown length": (
        lambda: schedules.learning_rate(UNKNOWN[0], None),
        "--lr-rule constant --warmup-epochs 0",
        lambda: schedules.learning_rate(UNKNOWN[1], None),
    ),
}


@pytest.mark.parametrize("name", FIXES)
def test_suggested_fix_trains(name: str) -> None:
    mistake, message, fix = FIXES[name]
    with pytest.raises(TfdistError, match=message):
        mistake()
    fix()


def test_repeating_data_that_end_early_trains() -> None:
    with pytest.warns(UserWarning, match=r"Use \.repeat\(\) on the dataset"):
        mirrored().fit(dataset(), steps_per_epoch=9, verbose=0)
    trainer = mirrored()
    trainer.fit(dataset().repeat(), steps_per_epoch=9, verbose=0)
    assert int(trainer.model.optimizer.iterations) == 9


def test_calling_init_before_tensorflow_connects_workers(tmp_path: Path) -> None:
    two = Cluster("test", rank=0, size=2, addresses=("localhost:1", "localhost:2"))
    with pytest.raises(ClusterError, match="can no longer connect") as refused:
        _tf_strategy(("CPU:0",), "ring", two)
    (call,) = re.findall(r"Call (tfdist\S+) before", str(refused.value))
    body = f"""
import tfdist
strategy = {call}
from tests.support.classifier import LABELS, X, build
trainer = tfdist.Trainer(build(), strategy)
trainer.fit(X, LABELS, batch_size=4, verbose=0)
print(trainer.strategy.num_replicas, "replicas")
"""
    done = launch("--", sys.executable, program(tmp_path, body), cwd=tmp_path)
    assert sorted(done.stdout.splitlines()) == ["[0] 2 replicas", "[1] 2 replicas"], done.stderr
