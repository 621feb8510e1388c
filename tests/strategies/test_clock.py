"""The end of a step: the host reads a result of a device that runs ahead of the graph."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfdist.strategies import clock
from tfdist.upstream.tensorflow_graphs import graphs_run_by


@pytest.mark.parametrize("ahead", [True, False])
def test_end_of_a_step_waits_for_the_device(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second CPU device simulates a GPU. Counts ops in the graph optimized by TensorFlow."""
    monkeypatch.setattr(clock, "_runs_ahead", lambda device: ahead and device.endswith("CPU:1"))

    @tf.function(autograph=False)
    def timed(x: tf.Tensor) -> tf.Tensor:
        with tf.device("CPU:1"):
            done = tf.linalg.matmul(x, x)
        with tf.name_scope("timed"):
            return clock.after([done, None])

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
