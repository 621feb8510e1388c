"""Sharding over processes: what rank 0 does alone applies to all, and no process hangs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfdist
from tests.processes import chief_callbacks
from tests.strategies.sharded import scenarios
from tests.support.packages import needs_horovod
from tests.support.training import FIT, TOLERANCE, assert_close, momentum
from tfdist.trainer import Trainer

pytestmark = [
    needs_horovod,
    pytest.mark.processes,
    pytest.mark.long,  # conformance with two processes tests the step itself
    pytest.mark.xdist_group("sharded-over-processes"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


def fit(folder: Path, epochs: int) -> Trainer:
    checkpoints = tfdist.Checkpoints(folder / "checkpoints")
    trainer = Trainer(momentum, "one_device", checkpoints=checkpoints)
    trainer.fit(**FIT, epochs=epochs)
    return trainer


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    """The results of both processes, from one start."""
    fit(folder, scenarios.EPOCHS[0])
    return tfdist.notebook_launch(functools.partial(scenarios.run, str(folder)), num_workers=2)


def test_resumes_from_another_strategy_and_back(found: dict[str, Any], folder: Path) -> None:
    resumed, plain = fit(folder, scenarios.EPOCHS[2]).model, momentum()
    plain.fit(**FIT, epochs=scenarios.EPOCHS[2])
    assert_close(resumed.get_weights(), plain.get_weights())


def test_each_process_has_half_of_the_state(found: dict[str, Any]) -> None:
    whole = sum(4 * v.shape.num_elements() for v in momentum().trainable_variables)
    assert (found["state bytes"] < 0.75 * whole + 12).all()


def test_no_process_has_the_whole_model_while_it_loads(found: dict[str, Any]) -> None:
    for size, held, value in found["bytes while loading"].reshape(2, 3):
        assert held == size / 2
        assert value == 1.0  # as rank 0 has loaded


def test_rank_0_can_use_the_model_alone(found: dict[str, Any], folder: Path) -> None:
    plain = momentum()
    plain.fit(**FIT)
    kernel, *others = plain.get_weights()
    wanted = np.concatenate([weight.ravel() for weight in (0.5 * kernel, *others)])
    np.testing.assert_array_equal(*found["on rank 0"])
    np.testing.assert_allclose(found["on rank 0"][0], wanted, rtol=TOLERANCE, atol=TOLERANCE)
    assert keras.models.load_model(folder / "resumed.keras").optimizer.built


def test_other_ranks_using_the_model_alone_raise(found: dict[str, Any]) -> None:
    assert "Rank 1 reads or assigns to" in found["error"]
    assert "do it on all ranks, or on rank 0 alone" in found["error"]


def test_weights_are_gathered_by_layer_in_the_compute_dtype(found: Any) -> None:
    half = 4096 / 2  # a process sends half of a layer's elements in an all-gather or reduce-scatter
    whole, mixed = found["bytes sent"]
    summed = 4 * 4 * half
    num_gathers = 4 + 1  # the backward pass gathers one layer's weights again
    metrics_at_most = 200
    assert 0 <= whole - (summed + num_gathers * 4 * half) < metrics_at_most
    assert 0 <= mixed - (summed + num_gathers * 2 * half) < metrics_at_most


def test_callbacks_of_rank_0_read_and_restore(found: dict[str, Any]) -> None:
    of_callbacks = found["callbacks"]
    assert of_callbacks["files"] == ["1.weights.h5", "2.weights.h5", "backup", "board", "log.csv"]
    first, third = (chief_callbacks.plain(epochs) for epochs in (1, 3))
    np.testing.assert_array_equal(*of_callbacks["first_epoch"])
    np.testing.assert_allclose(
        of_callbacks["first_epoch"][0], first, rtol=TOLERANCE, atol=TOLERANCE
    )
    np.testing.assert_array_equal(*of_callbacks["resumed"])
    np.testing.assert_allclose(of_callbacks["resumed"][0], third, rtol=TOLERANCE, atol=TOLERANCE)
