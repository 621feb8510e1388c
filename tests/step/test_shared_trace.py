"""Shared traces: what the graph contains, and what cannot be shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tests.step.test_control_edges import traced_step
from tfdist.step.shared_trace import NotShareableError, SharedTrace
from tfdist.strategies import mirrored_variables


def test_graph_contains_model_and_update_once() -> None:
    definition = traced_step("mirrored", 4, depth=3, one_trace_from=0).as_graph_def()
    functions = [[node.op for node in f.node_def] for f in definition.library.function]
    assert sum("MatMul" in function for function in functions) == 1
    assert sum("AssignSubVariableOp" in f or "AssignVariableOp" in f for f in functions) == 1
    outside = [node.op for node in definition.node]
    assert sum(op.endswith("PartitionedCall") for op in outside) == 2 * 4
    assert len(outside) < 4 * 30, outside  # packing and unpacking happen inside the shared function


def test_small_model_is_traced_for_each_replica() -> None:
    outside = [node.op for node in traced_step("mirrored", 2, depth=3).as_graph_def().node]
    assert not any(op.endswith("PartitionedCall") for op in outside)


def test_each_device_has_separate_variables() -> None:
    plain = tf.Variable(1.0)
    device = tf.config.list_logical_devices("CPU")[-1].name
    with tf.device(device):
        copy = tf.Variable(5.0)
    vars(plain)["_tfdist_copies"] = {device: copy}
    shared = SharedTrace(lambda x: x * plain)

    @tf.function(autograph=False)
    def both(x: tf.Tensor) -> list[tf.Tensor]:
        found = []
        for name in ("", device):
            with mirrored_variables.on_device(name):
                found.append(shared(x))
        return found

    assert [float(value) for value in both(tf.constant(2.0))] == [2.0, 10.0]


def _draws(x: tf.Tensor) -> tf.Tensor:
    return x + tf.random.normal([])


def _draws_in_a_loop(x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(lambda y: y < 3.0, lambda y: y + tf.random.uniform([]), [x])[0]


def _refuses(x: tf.Tensor) -> Any:
    raise NotShareableError("sums")


@pytest.mark.parametrize("fn", [_draws, _draws_in_a_loop, _refuses])
def test_state_and_collectives_are_not_shared(fn: Callable[..., Any]) -> None:
    found: list[Any] = []

    @tf.function(autograph=False)
    def on_replica(x: tf.Tensor) -> None:
        found.append(SharedTrace(fn)(x))

    on_replica(tf.constant(2.0))
    assert found == [None]


def test_reason_for_separate_traces_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    @tf.function(autograph=False)
    def on_replica(x: tf.Tensor) -> None:
        SharedTrace(_refuses)(x)
        SharedTrace(_draws)(x)
        SharedTrace(lambda y: y + tf.constant("not a number"))(x)

    with caplog.at_level("INFO", logger="tfdist"):
        on_replica(tf.constant(2.0))
    reasons = [message.partition(": ")[2] for message in caplog.messages]
    assert reasons[0] == "sums."
    assert reasons[1] == "the function has operations with a state (RandomStandardNormal)."
    assert reasons[2].startswith("tracing for all failed: ")


def test_tensors_of_the_outer_graph_are_not_shared() -> None:
    found: list[Any] = []

    @tf.function(autograph=False)
    def on_replica(x: tf.Tensor) -> None:
        found.append(SharedTrace(lambda y: x + y)(tf.constant(1.0)))

    on_replica(tf.constant(2.0))
    assert found == [None]
