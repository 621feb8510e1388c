"""Shared traces, and the control edges of a step, which make graph optimization slow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.python.ops import op_selector

from tfdist import strategies
from tfdist.model_setup import build
from tfdist.replica.replica import StepOptions
from tfdist.rows import Rows
from tfdist.step.loss_scaling import Scaling
from tfdist.step.shared_trace import NotShareableError, SharedTrace
from tfdist.step.state import ForwardState
from tfdist.step.step import TrainStep
from tfdist.strategies import mirrored_variables
from tfdist.strategies.batches import Share


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


def traced_step(
    name: str,
    num_replicas: int,
    depth: int,
    layer: Callable[[], layers.Layer] = lambda: layers.Dense(2),
    **options: Any,
) -> tf.Graph:
    """Returns the graph of a step of a network with `depth` layers of two variables each."""
    strategy = strategies.create(name, num_replicas, **options)
    with strategy.scope():
        hidden = [layer() for _ in range(depth)]
        model = keras.Sequential([keras.Input((2,)), *hidden])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    rows = tf.zeros((4, 2))
    build.build_for_training(
        model, strategy, (tf.TensorSpec(rows.shape), tf.TensorSpec(rows.shape))
    )
    strategy.variables.prepare(model, [model.optimizer])

    def first_batch() -> tuple[tf.Tensor, tf.Tensor]:
        return rows, rows

    options = StepOptions()
    state = ForwardState(model, Rows(model, first_batch), options)
    step = TrainStep(model, strategy, state, Scaling(model.optimizer, None), options)

    @tf.function(autograph=False)
    def steps(rows: tf.Tensor) -> None:
        num_rows = tf.shape(rows)[0]
        step(num_rows * num_replicas, [Share(num_rows, (rows, rows))] * num_replicas)

    return steps.get_concrete_function(rows).graph


def edges_per_variable(name: str, num_replicas: int, depth: int) -> float:
    """Traces a step, and returns the control edges per variable and replica."""
    definition = traced_step(name, num_replicas, depth).as_graph_def()
    functions = (node for function in definition.library.function for node in function.node_def)
    nodes = [*definition.node, *functions]
    edges = sum(source.startswith("^") for node in nodes for source in node.input)
    return edges / (2 * depth) / num_replicas


@pytest.mark.parametrize(("name", "num_replicas"), [("one_device", 1), ("mirrored", 2)])
def test_control_edges_per_variable_are_independent_of_depth(name: str, num_replicas: int) -> None:
    shallow, deep = (edges_per_variable(name, num_replicas, depth) for depth in (4, 16))
    assert deep < 1.2 * shallow


def num_ops_visited(monkeypatch: pytest.MonkeyPatch, depth: int) -> int:
    """Traces a step, and returns how many ops TensorFlow visits while it searches for variables."""
    original, visited = op_selector.get_backward_walk_ops, []

    def counting(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        visited.extend(result)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(op_selector, "get_backward_walk_ops", counting)
        traced_step("mirrored", 2, depth, lambda: layers.BatchNormalization(synchronized=True))
    assert visited
    return len(visited)


def test_all_reduce_does_not_search_the_layers_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shallow, deep = (num_ops_visited(monkeypatch, depth) for depth in (2, 6))
    assert deep < 3.5 * shallow
