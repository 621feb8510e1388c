"""The abstract strategy, one in 56 lines, the clock of a step, and summaries in steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.strategies.every_second_step import EverySecondStep
from tests.support.training import X, Y
from tfdist import Trainer
from tfdist.groups.base import LocalGroup
from tfdist.strategies import inner_loop
from tfdist.strategies.base import ReplicaFn, Strategy
from tfdist.strategies.one_device import OneDevice
from tfdist.upstream.tensorflow_graphs import graphs_run_by


def test_single_process_communicates_with_itself() -> None:
    alone = OneDevice()
    np.testing.assert_array_equal(alone.group.gather([3.0, 4.0]), [[3.0, 4.0]])
    assert alone.group.is_chief
    context = alone.feed.input_context()
    assert (context.num_input_pipelines, context.num_replicas_in_sync) == (1, 1)
    alone.group.barrier()


def test_strategy_without_all_reduce_cannot_be_created() -> None:
    class Incomplete(Strategy):
        def run(self, fn: ReplicaFn) -> Any:
            return fn(0)

        def local_results(self, results: Any) -> list[Any]:
            return [results]

        def update(self, fn: Callable[[Any], Any], results: Any) -> list[Any]:
            return [fn(results)]

    with pytest.raises(TypeError, match=r"abstract method.* all_reduce"):
        Incomplete(["CPU:0"])  # type: ignore[abstract]


def test_process_group_multiplies_the_replicas() -> None:
    class Second(LocalGroup):
        size, rank = 3, 1

        def gather(self, numbers: Sequence[float]) -> np.ndarray:
            exchanged.append(numbers)
            return np.array([numbers] * 3, np.float64)

    exchanged: list[Sequence[float]] = []
    strategy = OneDevice("CPU:0", Second())
    assert (strategy.num_replicas, strategy.first_replica, strategy.group.rank) == (3, 1, 1)
    assert not strategy.group.is_chief
    assert strategy.group.size > 1
    element = strategy.feed.split(tf.range(7), own_rows=False)
    assert int(element.num_rows) == 7
    assert element.shares[0].rows.numpy().tolist() == [2, 3]
    exchanged.clear()
    strategy.group.barrier()
    assert exchanged, "the barrier did not wait for the other processes"


def test_equals_accumulation_over_two_steps_on_one_device() -> None:
    inputs = np.random.default_rng(0).normal(size=(40, 5))
    labels = (inputs.sum(1, keepdims=True) > 0).astype("float64")

    def fit(strategy: EverySecondStep | None, accumulate: int | None) -> list[np.ndarray]:
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(8, "tanh", dtype="float64"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((5,)), *layers])
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=accumulate)
        model.compile(optimizer, "mse")
        if strategy is None:
            model.fit(inputs, labels, batch_size=7, epochs=2, shuffle=False, verbose=0)
            return model.get_weights()
        trainer = Trainer(model, strategy=strategy)
        trainer.fit(inputs, labels, batch_size=7, epochs=2, shuffle=False, verbose=0)
        return trainer.model.get_weights()

    results = fit(EverySecondStep(2), None)
    for result, expected in zip(results, fit(None, 2), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(results, fit(None, None), strict=True))


@pytest.mark.parametrize("ahead", [True, False])
def test_end_of_a_step_waits_for_the_device(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second CPU device simulates a GPU. Counts ops in the graph optimized by TensorFlow."""
    monkeypatch.setattr(
        inner_loop, "_runs_ahead", lambda device: ahead and device.endswith("CPU:1")
    )

    @tf.function(autograph=False)
    def timed(x: tf.Tensor) -> tf.Tensor:
        with tf.device("CPU:1"):
            done = tf.linalg.matmul(x, x)
        with tf.name_scope("timed"):
            return inner_loop.time_after([done, None])

    run = graphs_run_by(lambda: timed(tf.ones([3, 3])))
    nodes = {node.name: node for one in run for part in one.partition_graphs for node in part.node}
    # Other threads of the process, such as those of datasets, run graphs at the same time.
    own = [node for node in nodes.values() if node.name.startswith("timed/")]
    (timestamp,) = (node for node in own if node.op == "Timestamp")
    assertions = [node for node in own if node.op == "Assert"]
    assert len(assertions) == ahead
    for assertion in assertions:
        assert f"^{assertion.name}" in timestamp.input
        assert nodes[assertion.input[1]].op.endswith("Recv")  # data sent by the other device


def test_interface_stays_small() -> None:
    """What differs between layouts of variables or feeds belongs to `variables` and `feed`."""
    methods = {name for name in vars(Strategy) if not name.startswith("_")}
    attributes = {"devices", "group", "variables", "feed", "exchange", "inexact", "name"}
    constants = {"default_cpus", "one_trace_from"}
    assert methods - constants == {
        *("run", "local_results", "update", "all_reduce", "gradients", "outputs"),
        *("num_local_replicas", "num_replicas", "first_replica", "check_custom_step"),
        *("scope", "translate_errors", "describe", "summary"),
    }
    assert vars(OneDevice()).keys() | {"name"} == attributes


class Written(layers.Layer):
    """Writes the mean of its inputs."""

    def call(self, inputs: Any) -> Any:
        tf.summary.scalar("written", tf.reduce_mean(inputs), step=0)
        return inputs


def build_with_summaries() -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), Written(), layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("strategy", ["mirrored", "towers"])
def test_summary_is_written_once_for_each_step(strategy: str, tmp_path: Path) -> None:
    writer = tf.summary.create_file_writer(str(tmp_path))
    trainer = tfdist.Trainer(build_with_summaries, strategy=strategy, devices=2)
    with writer.as_default():
        trainer.fit(X[:8], Y[:8], batch_size=4, verbose=0)
    writer.close()
    (file,) = tmp_path.iterdir()
    events = tf.compat.v1.train.summary_iterator(str(file))
    names = [value.tag.split("/")[-1] for event in events for value in event.summary.value]
    assert names == ["written"] * 2
