"""What a step copies to the host, and sizes that are computed there."""

from __future__ import annotations

import gc
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.gpu_paths import host_copies
from tests.gpu_paths.kernel_coverage import gpus_listed
from tests.gpu_paths.step_graph import step_graphs
from tests.support.training import building
from tfdist.patches.sizes_on_host import with_sizes_on_host
from tfdist.strategies import Strategy
from tfdist.strategies.mirrored import Mirrored
from tfdist.strategies.one_device import OneDevice

#: Whether gradients have overflowed decides a branch, and is counted in int32.
_OVERFLOW = ["Cast -> Greater", "LogicalNot -> If"]

build = building(
    lambda: [
        keras.Input((4, 4, 3)),
        layers.Conv2D(4, 3),
        layers.BatchNormalization(),
        layers.Flatten(),
        layers.Dense(5),
    ],
    optimizer="sgd",
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)


def data(is_finite: bool) -> tf.data.Dataset:
    """Returns batches: of a finite dataset of unknown length, or of an endless one."""
    x, y = np.zeros((20, 4, 4, 3), "float32"), np.zeros(20, "int64")
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    return batches.filter(lambda *_: True) if is_finite else batches.repeat()


def mirrored() -> Mirrored:
    """Returns two replicas whose batches are copied to their devices ahead."""
    return Mirrored(["CPU:1", "CPU:2"], prefetch_to_device=True)


@pytest.mark.parametrize("is_finite", [True, False])
@pytest.mark.parametrize(("precision", "expected"), [("float32", []), ("mixed_float16", _OVERFLOW)])
def test_step_copies_nothing_to_the_host(
    precision: str, expected: list[str], is_finite: bool
) -> None:
    steps = None if is_finite else 3
    graphs = step_graphs(OneDevice("CPU:1"), build, data(is_finite), steps, precision=precision)
    assert host_copies.copies(graphs.traced) == expected


def test_traced_loop_outlives_its_trainer() -> None:
    graphs = step_graphs(OneDevice("CPU:1"), build, data(is_finite=False), 3)
    gc.collect()
    assert graphs.traced.get_operations()


def test_loop_of_mirrored_replicas_copies_nothing_to_the_host() -> None:
    with gpus_listed():
        graphs = step_graphs(mirrored(), build, data(is_finite=False), 3)
    assert host_copies.copies(graphs.traced) == []


@pytest.mark.parametrize("strategy", [lambda: OneDevice("CPU:1"), mirrored])
def test_sizes_of_sequences_are_computed_on_the_host(strategy: Callable[[], Strategy]) -> None:
    """Dense layers multiply the sizes of their inputs, and poolings those of their gradients."""
    build_sequence = building(
        lambda: [
            keras.Input((6, 3)),
            layers.Dense(4, "relu"),
            layers.Dropout(0.5),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1),
        ],
        optimizer="adam",
    )
    x = np.zeros((20, 6, 3), "float32")
    batches = tf.data.Dataset.from_tensor_slices((x, x[:, 0, :1])).batch(8).repeat()
    with gpus_listed():
        graphs = step_graphs(used := strategy(), build_sequence, batches, 3)
    copies = host_copies.copies(graphs.traced)
    assert copies == ["Cast -> StatelessRandomGetKeyCounter"] * used.num_replicas  # Dropout's seed


def test_copies_are_found() -> None:
    """GPUs leave sums of int32 to the host, which also decides between branches."""

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.device("CPU:1"):
            total = tf.add_n([tf.cast(x, tf.int32), tf.cast(x * 2, tf.int32)])
        return tf.cond(tf.math.is_finite(x), lambda: total, lambda: 0)

    graph = step.get_concrete_function(tf.TensorSpec([], tf.float32)).graph
    assert host_copies.copies(graph) == ["Cast -> AddN", "Cast -> AddN", "IsFinite -> StatelessIf"]


def placed(x: tf.Tensor, labels: tf.Tensor) -> dict[str, str]:
    """Returns the devices of a graph's operations, by their names."""

    def compute() -> None:
        shape = tf.shape(x)
        size = tf.reduce_prod(tf.gather(shape, [0, 1]), name="size")
        tf.reshape(x, tf.stack([size, 3]), name="reshape")
        tf.reduce_prod(labels, name="of_labels")
        tf.cond(size > 4, lambda: tf.gather(shape, 0, name="in_branch"), lambda: 0, name="branch")
        tf.cast(size, tf.float32, name="as_float")

    with tf.device("CPU:1"):
        with_sizes_on_host(compute)()
    return {operation.name: operation.device for operation in x.graph.get_operations()}


def graph() -> dict[str, str]:
    """Returns the devices in a graph of a batch of unknown size, and of its labels."""
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, 2, 3])
        return placed(x, tf.compat.v1.placeholder(tf.int32, [4]))


def test_sizes_are_on_the_host_and_nothing_else() -> None:
    with gpus_listed():
        devices = graph()
    assert devices["size"].endswith("CPU:0")
    others = ["Shape", "reshape", "of_labels", "branch", "as_float"]
    assert [devices[name][-5:] for name in others] == ["CPU:1"] * 5


def test_nothing_changes_without_gpus() -> None:
    assert not any(device.endswith("CPU:0") for device in graph().values())
