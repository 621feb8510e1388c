"""The number of control edges in a step, which determines the time of graph optimization."""

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
from tfdist.step.state import ForwardState
from tfdist.step.step import TrainStep
from tfdist.strategies.batches import Share


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


def test_all_reduce_does_not_search_the_layers_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shallow, deep = (num_ops_visited(monkeypatch, depth) for depth in (2, 6))
    assert deep < 3.5 * shallow
