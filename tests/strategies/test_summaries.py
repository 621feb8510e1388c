"""Summaries that a layer writes reach the caller's writer, once for each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.support.training import X, Y


class Written(layers.Layer):
    """Writes the mean of its inputs."""

    def call(self, inputs: Any) -> Any:
        tf.summary.scalar("written", tf.reduce_mean(inputs), step=0)
        return inputs


def build() -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), Written(), layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("strategy", ["mirrored", "towers"])
def test_summary_is_written_once_for_each_step(strategy: str, tmp_path: Path) -> None:
    writer = tf.summary.create_file_writer(str(tmp_path))
    trainer = tfdist.Trainer(build, strategy=strategy, devices=2)
    with writer.as_default():
        trainer.fit(X[:8], Y[:8], batch_size=4, verbose=0)
    writer.close()
    (file,) = tmp_path.iterdir()
    events = tf.compat.v1.train.summary_iterator(str(file))
    names = [value.tag.split("/")[-1] for event in events for value in event.summary.value]
    assert names == ["written"] * 2
