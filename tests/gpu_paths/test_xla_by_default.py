"""What `jit_compile="auto"` means on a host with GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.support.training import building
from tfdist.upstream.patching import replaced

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
    assert trainer.describe()["XLA"] == ("forward and backward pass" if uses_xla else "no")
