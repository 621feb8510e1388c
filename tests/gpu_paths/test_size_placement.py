"""On hosts with GPUs, sizes are computed on the host, and everything else on the GPU."""

from __future__ import annotations

import tensorflow as tf

from tests.gpu_paths.kernel_coverage import gpus_listed
from tfdist.patches.sizes_on_host import with_sizes_on_host


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
