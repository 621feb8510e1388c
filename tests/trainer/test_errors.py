"""Options and devices for which the trainer raises: the message names the value and the fix."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import tensorflow as tf

import tfdist
from tests.support.classifier import build
from tests.support.starting import run
from tfdist.errors import (
    ConfigurationError,
    DataError,
    DeviceError,
    NonFiniteError,
    TfdistError,
    UnsupportedModelError,
)
from tfdist.strategies.one_device import OneDevice


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (ConfigurationError, ValueError),
        (DataError, ValueError),
        (DeviceError, RuntimeError),
        (NonFiniteError, ArithmeticError),
        (UnsupportedModelError, TypeError),
    ],
)
def test_errors_derive_from_tfdist_error_and_a_builtin(error: type, builtin: type) -> None:
    assert issubclass(error, TfdistError)
    assert issubclass(error, builtin)


def test_option_of_another_strategy_raises() -> None:
    with pytest.raises(ConfigurationError, match="'mirrored' has no option 'parameter_device'"):
        tfdist.strategies.create("mirrored", 2, parameter_device="CPU:0")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 0}, "accumulate=0: expected an integer of at least 1"),
        ({"accumulate": "2"}, "accumulate='2': expected an integer of at least 1"),
        ({"accumulate": 2, "sync_batch_norm": True}, "Use only one of the two"),
        ({"checkpoints": "runs/a"}, r"expected tfdist\.Checkpoints\('runs/a'\)"),
        ({"strategy": "mirorred"}, "mirrored, central_storage, towers"),
        ({"strategy": None}, "strategy=None: expected a tfdist Strategy or one of the names"),
        ({"strategy": tf.distribute.get_strategy()}, "expected a tfdist Strategy or one of"),
        ({"strategy": OneDevice()}, "devices= has no effect"),
    ],
)
def test_invalid_options_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        tfdist.Trainer(build, devices=2, **options)


STARTED = """
import warnings
import tensorflow as tf
tf.constant(1) + 1
import tfdist
from tests.support import ROOT
from tests.support.classifier import X, LABELS, build
try:
    tfdist.Trainer(build, devices=2)
except tfdist.errors.DeviceError as error:
    print("raised:", error)
print(tfdist.Trainer(build, "mirrored").strategy.num_replicas, "replica with a warning")
warnings.simplefilter("error", UserWarning)
trainer = tfdist.Trainer(build)
trainer.fit(X, LABELS, batch_size=4, verbose=0)
print("replicas:", trainer.strategy.num_replicas)
"""


def test_tensorflow_that_started_first_limits_the_devices() -> None:
    # As in a notebook: there is no script that tfdist could search for the number of devices.
    done = run(sys.executable, "-c", "import tfdist.errors\n" + STARTED)
    assert "raised: Expected 2 logical CPU devices" in done.stdout
    assert "Call tfdist.devices.configure(2) before the first" in done.stdout
    assert "Continuing with 1" in done.stderr
    assert "1 replica with a warning" in done.stdout
    assert "replicas: 1" in done.stdout
