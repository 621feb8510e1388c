"""Small adapters: patched attributes, prefetched data, and Keras's backend."""

from __future__ import annotations

import os
import sys
import types

import keras
import pytest
import tensorflow as tf

import pipelines
from tests.support.starting import run
from tfdist.errors import ConfigurationError
from tfdist.upstream import check_backend
from tfdist.upstream.input_data import is_prefetched
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
    "starts", [("-m", "tfdist.train", "--smoke"), ("-c", "import tfdist; tfdist.Trainer")]
)
def test_backend_that_is_not_installed(starts: tuple[str, ...]) -> None:
    environ = os.environ | {"KERAS_BACKEND": "torch"}
    done = run(sys.executable, *starts, env=environ, code=1)
    assert done.stderr.strip().endswith(
        "No module named 'torch'. Set KERAS_BACKEND=tensorflow before Python starts, or the "
        "backend in ~/.keras/keras.json."
    )


def test_backend_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    with pytest.raises(ConfigurationError, match=r"computes with 'jax'.*Set KERAS_BACKEND=tensorf"):
        check_backend()
