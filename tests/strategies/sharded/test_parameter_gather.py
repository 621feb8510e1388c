"""Sharded variables are gathered in buckets, of which at most three are whole at a time."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

from tfdist.replica.scope import Scope, layer_inputs_noted
from tfdist.strategies.sharded import parameter_gather
from tfdist.strategies.sharded.division import OverDevices
from tfdist.upstream.keras_variables import divide
from tfdist.upstream.tensorflow_graphs import Dependencies

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
