"""Small adapters: patched attributes, prefetched data, backends, gradients of sharded weights."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import pipelines
from tests.support import ROOT
from tests.support.starting import run
from tfdist.errors import ConfigurationError, UnsupportedModelError
from tfdist.strategies.sharded.division import OverDevices
from tfdist.strategies.tensor_parallel.splits import AlongAxis
from tfdist.upstream import check_backend
from tfdist.upstream.input_data import is_prefetched
from tfdist.upstream.keras_variables import divide
from tfdist.upstream.patching import replaced


def test_attributes_are_restored_in_nested_blocks() -> None:
    owner = types.SimpleNamespace(a=1)
    with replaced(owner, "a", 2), replaced(owner, "a", 3), replaced(owner, "b", 4):
        assert (owner.a, owner.b) == (3, 4)
    assert vars(owner) == {"a": 1}


def test_blocks_that_cross_are_refused() -> None:
    owner = types.SimpleNamespace(a=1)
    outer, inner = replaced(owner, "a", 2), replaced(owner, "a", 3)
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match="replaced by another thread"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    assert owner.a == 2


NUMBERS = tf.data.Dataset.range(4)


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (NUMBERS, False),
        (NUMBERS.prefetch(1), True),
        (NUMBERS.prefetch(1).batch(2), False),
        (pipelines.without_autotuning(NUMBERS), False),
        # As `Trainer` and `pipelines.read` return their data sets.
        (pipelines.without_autotuning(NUMBERS.prefetch(1)), True),
        (pipelines.without_autotuning(NUMBERS.prefetch(1)).with_options(tf.data.Options()), True),
    ],
)
def test_data_that_are_prefetched_are_not_prefetched_again(
    dataset: tf.data.Dataset, expected: bool
) -> None:
    assert is_prefetched(dataset) == expected


@pytest.mark.parametrize(
    ("starts", "backend", "reason"),
    [
        (("-m", "tfdist.train", "--smoke"), "openvino", "No module named 'openvino'"),
        (("-m", "tfdist.train", "--recipe", "./one.py"), "theano", "backend : theano"),
        (("-m", "tfdist.script", "one.py"), "torch", "No module named 'torch'"),
        (("-c", "import tfdist; tfdist.Trainer"), "torch", "No module named 'torch'"),
    ],
)
def test_backend_that_is_not_installed(
    starts: tuple[str, ...], backend: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "one.py").write_text("import keras")
    environ = os.environ | {"KERAS_BACKEND": backend, "PYTHONPATH": str(ROOT)}
    done = run(sys.executable, *starts, env=environ, cwd=tmp_path, code=1)
    assert (
        done.stderr.strip()
        .removesuffix("\nRun python -m tfdist.train --help for all flags.")
        .endswith(
            f"{reason}. Set KERAS_BACKEND=tensorflow before Python starts, or the backend in "
            "~/.keras/keras.json."
        )
    )


def test_backend_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    with pytest.raises(ConfigurationError, match=r"computes with 'jax'.*Set KERAS_BACKEND=tensorf"):
        check_backend()


@pytest.mark.parametrize("division", [AlongAxis(0, [2, 1]), OverDevices(2)])
def test_user_tape_gets_gradients_of_sharded_weights(division: Any) -> None:
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    x = tf.reshape(tf.range(6.0), (2, 3))

    def gradients() -> list:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x) ** 2)
        unused = keras.Variable(1.0)
        result = tape.gradient(loss, [layer.kernel, layer.bias.value, x, unused])
        assert result.pop() is None
        return [keras.ops.convert_to_numpy(gradient) for gradient in result]

    wanted = gradients()
    divide(layer.kernel, division, ["CPU:0", "CPU:1"], keep_whole=False)
    for one, other in zip(gradients(), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(x) ** 2)
    np.testing.assert_allclose(tape.gradient(loss, layer.kernel.value), wanted[0], rtol=1e-6)
    traced = tf.function(lambda x: layer(x), autograph=False)
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(traced(x) ** 2)
        np.testing.assert_allclose(tape.gradient(loss, layer.kernel), wanted[0], rtol=1e-6)

    @tf.function(autograph=False)
    def within() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x) ** 2)
        return tape.gradient(loss, layer.kernel.value)

    np.testing.assert_allclose(within(), wanted[0], rtol=1e-6)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(x)
    assert tape.gradient(loss, layer.kernel) is None


def test_shards_of_other_processes_raise() -> None:
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    division = OverDevices(2)
    division.has_all = False
    divide(layer.kernel, division, ["CPU:0", "CPU:1"], keep_whole=False)
    for source in (layer.kernel, layer.kernel.value):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.ones((1, 3))))
        with pytest.raises(UnsupportedModelError, match=r"train with trainer\.fit"):
            tape.gradient(loss, source)
