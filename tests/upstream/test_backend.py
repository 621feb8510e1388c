"""Keras with another backend than TensorFlow gets one line with the fix."""

from __future__ import annotations

import os
import sys

import keras
import pytest

from tests.support.starting import run
from tfdist.errors import ConfigurationError
from tfdist.upstream import check_backend


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
