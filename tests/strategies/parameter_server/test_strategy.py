"""Parameter servers.

Connecting to a cluster invalidates every tensor of a process, so these tests share a separate
process, which connects once.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.support import model_edits
from tests.support.training import FIT, assert_close, build, reference, steps
from tfdist import cluster
from tfdist.errors import ClusterError, ConfigurationError
from tfdist.strategies.parameter_server.strategy import (
    ParameterServer,
    atomic_adds,
    fetch_rows_only,
)

SECONDS = 300.0
EPOCHS, BATCHES = 3, 40
ROWS = np.random.default_rng(0).normal(size=(8 * BATCHES, 4)).astype("float32")
LABELS = (ROWS[:, :1] > 0).astype("float32")

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def in_cluster() -> Iterator[Run]:
    """Runs a function of this module in the process that contains the cluster."""
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    try:
        yield lambda fn, *arguments: pool.submit(fn, *arguments).result(SECONDS)
    finally:
        for process in pool._processes.values():
            process.kill()
        pool.shutdown()


def trainer(build_model: Any, **options: Any) -> tfdist.Trainer:
    return tfdist.Trainer(build_model, ParameterServer(2, num_servers=2), **options)


def classifier() -> keras.Model:
    """Returns a network whose learning rate drops to zero in the second epoch."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(8, "relu"), layers.Dense(1, "sigmoid")]
    )
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([BATCHES - 1], [0.5, 0.0])
    metrics = ["accuracy", keras.metrics.AUC(name="auc")]
    model.compile(keras.optimizers.SGD(rate), "binary_crossentropy", metrics=metrics)
    return model


def trained_by_two() -> dict[str, Any]:
    one = trainer(classifier)
    weights: list[Any] = []
    keep = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: weights.append(one.model.get_weights())
    )
    history = one.fit(ROWS, LABELS, batch_size=8, epochs=EPOCHS, verbose=0, callbacks=[keep])
    counters = [v for v in one.model.metrics_variables if v.path.endswith("count")]
    return {
        "history": history.history,
        "steps": steps(one.model),
        "rows": [float(v.numpy()) for v in counters],
        "servers": {v.value.device for v in one.model.trainable_variables},
        "weights": weights,
        "evaluated": one.evaluate(ROWS, LABELS, batch_size=33, verbose=0, return_dict=True),
        "predicted": one.predict(ROWS, batch_size=33, verbose=0),
        "summary": one.strategy.summary(),
        "described": one.describe(),
    }


@pytest.fixture(scope="module")
def result(in_cluster: Run) -> dict[str, Any]:
    return in_cluster(trained_by_two)


def test_two_workers_count_exactly(result: dict[str, Any]) -> None:
    assert result["steps"] == EPOCHS * BATCHES
    assert result["rows"] == [len(ROWS)] * 2  # of loss and accuracy, in the last epoch


def test_two_workers_learn(result: dict[str, Any]) -> None:
    assert result["evaluated"]["accuracy"] > 0.9
    assert result["history"]["loss"][-1] < result["history"]["loss"][0]


def test_schedules_count_the_updates_of_all_workers(result: dict[str, Any]) -> None:
    first, *later = result["weights"]
    assert not np.array_equal(first[0], classifier().get_weights()[0])
    for weights in later:
        for one, other in zip(weights, first, strict=True):
            np.testing.assert_array_equal(one, other)


def test_evaluates_and_predicts_each_row_once(result: dict[str, Any]) -> None:
    model = classifier()
    model.set_weights(result["weights"][-1])
    wanted = model.evaluate(ROWS, LABELS, batch_size=33, verbose=0, return_dict=True)
    assert_close(dict(sorted(result["evaluated"].items())), wanted)
    assert_close(result["predicted"], model.predict(ROWS, batch_size=33, verbose=0))


def test_variables_are_distributed_over_servers(result: dict[str, Any]) -> None:
    assert len(result["servers"]) == 2
    assert all("/job:ps/" in device for device in result["servers"])


def test_reports_inexactness_and_staleness(result: dict[str, Any]) -> None:
    assert "asynchronous" in result["described"]["not exact"]
    assert "updates on average" in result["summary"]["staleness"]


def train_step_by_step() -> list[np.ndarray]:
    one = trainer(build, steps_per_call=1)
    one.fit(**FIT, epochs=2)
    return one.model.get_weights()


def test_sequential_steps_match_one_device(in_cluster: Run) -> None:
    assert_close(in_cluster(train_step_by_step), reference().get_weights())


def test_model_behaves_like_keras(in_cluster: Run, tmp_path: Path) -> None:
    in_cluster(check_model_edits, tmp_path)


def check_model_edits(folder: Path) -> None:
    model_edits.assert_matches_keras(trainer(model_edits.build), folder)


def from_generator() -> tuple[int, list[int]]:
    """Batches that only Python on the chief can produce; their number is unknown."""
    one = trainer(build)
    taken = []

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for number in range(13):
            taken.append(number)
            yield ROWS[:7], LABELS[:7]

    one.fit(batches(), verbose=0)
    return steps(one.model), taken


def test_each_batch_of_a_generator_goes_to_one_worker(in_cluster: Run) -> None:
    assert in_cluster(from_generator) == (13, list(range(13)))


def coordinator_logs_info() -> bool:
    tf.get_logger().setLevel("INFO")  # as in a notebook
    ParameterServer(2, num_servers=2)
    return tf.get_logger().isEnabledFor(logging.INFO)


def test_tensorflow_coordinator_logs_nothing(in_cluster: Run) -> None:
    assert not in_cluster(coordinator_logs_info)


def errors_of_a_lost_server() -> list[str]:
    """Returns the errors if the chief, in `fit` and `evaluate`, or a worker misses a server."""

    def lose(*_: Any) -> None:
        raise tf.errors.UnavailableError(None, None, "Connection reset by peer\nand more")

    one, other = trainer(build), trainer(build)
    losing = keras.callbacks.LambdaCallback(on_epoch_end=lose)
    losing.on_test_begin = lose
    messages = []
    with mock.patch.object(other.strategy.feed._coordinator, "join", lose):
        for attempt in (
            lambda: one.fit(**FIT, callbacks=[losing]),
            lambda: one.evaluate(ROWS, LABELS, verbose=0, callbacks=[losing]),
            lambda: other.fit(**FIT),
        ):
            with pytest.raises(ClusterError) as caught:
                attempt()
            messages.append(str(caught.value))
    return messages


def test_lost_server_raises(in_cluster: Run) -> None:
    for message in in_cluster(errors_of_a_lost_server):
        assert "A parameter server and its variables are gone (Connection reset by peer)" in message


def refusals() -> list[str]:
    ParameterServer(2, num_servers=2)
    messages = []
    for attempt in (
        lambda: ParameterServer(3, num_servers=2),
        lambda: trainer(
            lambda: build(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
        ).fit(**FIT),
    ):
        try:
            attempt()
        except ConfigurationError as error:
            messages.append(str(error))
    return messages


def test_second_cluster_and_accumulation_raise(in_cluster: Run) -> None:
    another_cluster, accumulation = in_cluster(refusals)
    assert "connects one once" in another_cluster
    assert "use accumulate in the Trainer" in accumulation


@pytest.mark.parametrize("devices", [0, "CPU:0", ["CPU:0", "CPU:1"]])
def test_devices_are_a_number_of_workers(devices: Any) -> None:
    with pytest.raises(ConfigurationError, match="how many"):
        ParameterServer(devices)


def test_partitioner_raises() -> None:
    with pytest.raises(ConfigurationError, match="several Embeddings"):
        ParameterServer(partitioner=lambda shape, dtype: [2])


ADDRESSES = ("a:1", "b:1")


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (cluster.Cluster("mpirun", 0, 2), "needs a chief, workers and ps"),
        (cluster.Cluster("TF_CONFIG", 0, 2, addresses=ADDRESSES, ps=("c:1",)), "no task 'chief'"),
        (
            cluster.Cluster("TF_CONFIG", 0, 1, addresses=("a:1",), ps=("c:1",), has_chief=True),
            "no task 'worker'",
        ),
    ],
)
def test_cluster_that_lacks_a_task_raises(
    found: cluster.Cluster, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "current", lambda: found)
    with pytest.raises(ClusterError, match=message):
        ParameterServer()


def operations(function: Any, *arguments: Any) -> set[str]:
    """Returns the op types of a traced function."""
    graph = function.get_concrete_function(*arguments).graph
    return {operation.type for operation in graph.get_operations()}


def test_reads_only_the_needed_rows_of_a_table() -> None:
    table = layers.Embedding(6, 2)
    table.build(None)

    @tf.function(autograph=False)
    def look_up(indices: tf.Tensor) -> tuple[tf.Tensor, Any]:
        with tf.GradientTape() as tape:
            result = table(indices)
        return result, tape.gradient(result, table.weights[0].value)

    indices = tf.constant([[1, -1], [4, 1]])
    with fetch_rows_only():
        kinds = operations(look_up, indices)
    assert "ResourceGather" in kinds
    assert "ReadVariableOp" not in kinds
    result, gradient = look_up(indices)
    np.testing.assert_array_equal(result, table(indices))
    np.testing.assert_array_equal(gradient.indices, [1, 5, 4, 1])


def test_assign_add_is_a_single_op() -> None:
    variable = keras.Variable(1.0)

    @tf.function
    def change() -> None:
        variable.assign_add(2.0)
        variable.assign_sub(0.5)

    with atomic_adds():
        change()
    kinds = operations(change)
    assert {"AssignAddVariableOp", "AssignSubVariableOp"} <= kinds
    assert "ReadVariableOp" not in kinds
    assert float(variable.numpy()) == 2.5
