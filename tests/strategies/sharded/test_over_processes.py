"""Sharding over processes: what rank 0 does alone applies to all, and no process hangs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.processes import chief_callbacks
from tests.strategies.sharded import scenarios
from tests.support.commands import needs_horovod
from tests.support.training import FIT, TOLERANCE, assert_close, momentum
from tfdist.replica.scope import Scope, layer_inputs_noted
from tfdist.strategies.sharded import parameter_gather
from tfdist.strategies.sharded.division import OverDevices
from tfdist.trainer import Trainer
from tfdist.upstream.keras_variables import divide
from tfdist.upstream.tensorflow_graphs import Dependencies

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
    scenarios.large(7).save(folder / "large.keras")
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


def test_each_rank_loads_its_shards_alone(found: dict[str, Any]) -> None:
    """Other files than rank 0's do not count."""
    for values in found["loaded"].reshape(2, 7):
        np.testing.assert_array_equal(values, [0.5, 7, 7, 1, 1, 1, 1])


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


# ---- gathering parameters ----


_UNITS, _NUM_LAYERS = 4, 12
_LAYER_BYTES = 4 * (_UNITS * _UNITS + _UNITS)


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[list[tf.Tensor]]:
    """Notes the tensors of each bucket that is gathered."""
    results: list[list[tf.Tensor]] = []
    together = parameter_gather.joined_together

    def join(*args: Any) -> list[tf.Tensor]:
        results.append([tf.identity(whole) for whole in together(*args)])
        return results[-1]

    monkeypatch.setattr(parameter_gather, "joined_together", join)
    return results


def _trace(bucket_bytes: int) -> tf.Graph:
    """Traces forward and backward pass of a network whose weights are sharded."""
    dense = [keras.layers.Dense(_UNITS, "tanh") for _ in range(_NUM_LAYERS)]
    model = keras.Sequential([keras.Input((_UNITS,)), *dense])
    for variable in model.trainable_variables:
        divide(variable, OverDevices(2), ["CPU:0", "CPU:0"], keep_whole=False)

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with Scope([], bucket_bytes=bucket_bytes) as scope, layer_inputs_noted():
            with scope.recorded() as tape:
                loss = tf.reduce_sum(model(x))
            return scope.gradients(
                lambda sources: tape.gradient(loss, sources), model.trainable_variables
            )

    return step.get_concrete_function(tf.TensorSpec([3, _UNITS])).graph


@pytest.mark.parametrize("num_layers", [1, 2])
def test_at_most_three_buckets_are_whole(num_layers: int, gathers: list[list[tf.Tensor]]) -> None:
    operations = Dependencies(_trace(num_layers * _LAYER_BYTES))
    num_forward = _NUM_LAYERS // num_layers
    # The backward pass reads no biases. It still has two buckets, and needs no first kernel.
    assert [len(bucket) for bucket in gathers[:num_forward]] == [2 * num_layers] * num_forward
    assert len(gathers) > num_forward
    uses = [set().union(*map(_uses, bucket)) for bucket in gathers]
    for use in set().union(*uses):
        before = operations.needed([use], set()) - {use}
        whole = [
            bucket
            for bucket, own in zip(gathers, uses, strict=True)
            # It may begin before this use has ended, and it may have to wait for others.
            if use not in operations.needed([tensor.op for tensor in bucket], set())
            and not own <= before
        ]
        assert len(whole) <= 3


def _uses(tensor: tf.Tensor) -> set[tf.Operation]:
    """Returns the operations that compute with a tensor or a copy of it."""
    results = set()
    for use in tensor.consumers():
        results |= _uses(use.outputs[0]) if use.type == "Identity" else {use}
    return results
