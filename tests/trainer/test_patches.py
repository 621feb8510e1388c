"""A trainer patches Keras and TensorFlow only during its calls."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf
from keras.src.backend import nn
from keras.src.backend.tensorflow import core
from keras.src.losses import loss as keras_loss

from tests.support.training import FIT, build
from tfdist.errors import ConfigurationError
from tfdist.trainer import Trainer


def patchable() -> list[Any]:
    """Returns functions and attributes that a trainer replaces during training."""
    return [
        core.remat,
        tf.GradientTape.gradient,
        tf.GradientTape.__enter__,
        keras_loss.scale_loss_for_distribution,
        keras.optimizers.Optimizer.apply,
        keras.Model.fit,
        keras.Layer.add_loss,
        keras.random.SeedGenerator.next,
        keras.callbacks.SwapEMAWeights._tf_swap_variables,
        nn.conv,
    ]


@pytest.mark.parametrize(
    "strategy", ["one_device", "mirrored", "sharded", "tensor_parallel", "pipeline"]
)
def test_nothing_stays_patched(strategy: str) -> None:
    before = patchable()
    trainer = Trainer(build, strategy, devices=None if strategy == "one_device" else 2, remat="all")
    assert patchable() == before
    trainer.fit(**FIT)
    assert patchable() == before


def test_remat_is_exact_within_calls() -> None:
    results: list[Any] = []

    class Recorder(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            results.append(core.remat)

    before = core.remat
    Trainer(build, "one_device").fit(**FIT, callbacks=[Recorder()])
    assert before not in results
    assert core.remat is before


def test_nothing_stays_patched_after_an_error() -> None:
    before = patchable()
    with pytest.raises(ConfigurationError, match="matches none of the layers"):
        Trainer(build, "one_device", remat="nothing").fit(**FIT)
    assert patchable() == before


def test_recompute_is_an_alias_of_remat() -> None:
    assert Trainer(build, "one_device", recompute="all").remat == "all"
    with pytest.raises(ConfigurationError, match="not both"):
        Trainer(build, "one_device", recompute="all", remat="dense")
