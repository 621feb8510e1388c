"""Graphs are freed with their training, and the graphs of a run are returned without others."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.layers import Dense
from tensorflow.python.framework.ops import gradient_registry

import tfdist
from tests.support.training import building
from tfdist import strategies
from tfdist.strategies import inner_loop
from tfdist.upstream.tensorflow_graphs import graphs_run_by, optimized


@pytest.mark.parametrize(("name", "devices"), [("one_device", 1), ("mirrored", 2)])
@pytest.mark.parametrize("make_loop", [inner_loop.in_graph, inner_loop.one_step_in_graph])
def test_graphs_are_freed_with_their_function(
    name: str, devices: int, make_loop: inner_loop.Loop
) -> None:
    strategy = strategies.create(name, devices)
    seen: list[weakref.ref[Any]] = []

    def note_graph() -> None:
        seen.append(weakref.ref(tf.compat.v1.get_default_graph()))

    class Step:
        training = True

        def __call__(self, total_rows: tf.Tensor, shares: Sequence[Any]) -> Any:
            """Reduces a tensor that a branch computes."""
            note_graph()
            total = tf.cond(total_rows > 0, lambda: (note_graph(), 1.0)[1], lambda: 0.0)
            return strategy.local_results(strategy.run(lambda _: strategy.all_reduce([total])))

        def logs(self) -> dict[str, Any]:
            note_graph()
            return {}

    loop: Any = strategy.feed.compile(Step(), make_loop)
    data = strategy.feed.distribute(tf.data.Dataset.range(6).batch(2))
    result, _ = loop(iter(data), tf.constant(1))
    assert result.num_steps == 1
    assert len(seen) >= 3
    assert all(graph() for graph in seen)
    del loop
    gc.collect()
    assert not any(graph() for graph in seen)


@pytest.mark.parametrize("name", ["mirrored", "pipeline"])
def test_gradients_of_functions_keep_no_graph(name: str) -> None:
    """A gradient of `tf.custom_gradient` is registered by a name of its own and holds tensors."""
    model = building(lambda: [keras.Input((4,)), Dense(3, "gelu"), Dense(2, "silu"), Dense(1)])
    trainer = tfdist.Trainer(model, strategy=name, devices=2)
    before = set(gradient_registry._registry)
    x, y = np.ones((4, 4), "float32"), np.ones((4, 1), "float32")
    trainer.fit(x, y, batch_size=2, verbose=0)
    trainer.predict(x, batch_size=2, verbose=0)
    del trainer
    gc.collect()
    assert set(gradient_registry._registry) == before


def test_function_of_a_layer_keeps_its_gradient_after_predict() -> None:
    class Traced(keras.layers.Layer):
        @tf.function
        def compute(self, x: tf.Tensor, training: bool) -> tf.Tensor:
            return tf.nn.silu(x)

        def call(self, inputs: tf.Tensor, training: bool = True) -> tf.Tensor:
            return self.compute(inputs, training)

    build = building(lambda: [keras.Input((4,)), Traced(), Dense(1)])
    trainer = tfdist.Trainer(build, strategy="one_device")
    trainer.predict(np.ones((4, 4), "float32"), verbose=0)
    x = tf.ones((4, 4))
    with tf.GradientTape() as tape:
        tape.watch(x)
        outputs = trainer.model(x, training=False)
    assert tape.gradient(outputs, x).shape == x.shape


def test_graphs_of_earlier_runs_are_not_returned() -> None:
    @tf.function
    def earlier(x: tf.Tensor) -> tf.Tensor:
        return tf.add(x, 1.0, name="earlier")

    @tf.function
    def now(x: tf.Tensor) -> tf.Tensor:
        return tf.add(x, 1.0, name="now")

    tf.summary.trace_on(graph=True)
    earlier(tf.ones([]))
    tf.summary.trace_off()
    run = graphs_run_by(lambda: now(tf.ones([])))
    names = {node.name for graph in run for node in graph.pre_optimization_graph.node}
    assert "now" in names
    assert "earlier" not in names


def test_optimizing_is_silent_beside_a_lookup_table(caplog: pytest.LogCaptureFixture) -> None:
    """The table adds None to a collection of the eager graph, which every new graph inherits."""
    initializer = tf.lookup.KeyValueTensorInitializer(["a"], [1])
    table = tf.lookup.StaticHashTable(initializer, default_value=0)
    function = tf.function(lambda x: x + 1).get_concrete_function(tf.TensorSpec([], tf.float32))
    with caplog.at_level(logging.WARNING, tf.get_logger().name):
        assert optimized(function.graph).node
    assert table.size() == 1
    assert not caplog.messages
