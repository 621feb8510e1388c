"""Clocks in a graph are read after a GPU has computed, not when it has accepted the work.

In a graph, an operation on a GPU ends as soon as it is in the GPU's queue: a control edge from it
does not wait for the result. A value that the host reads has been computed.
"""

from __future__ import annotations

import keras
import pytest

import tfdist
from tests.gpu_paths.kernel_coverage import HOST
from tests.gpu_paths.test_kernel_coverage import MODELS
from tfdist import strategies
from tfdist.strategies import clock
from tfdist.upstream.tensorflow_graphs import graphs_run_by


def test_clocks_wait_for_results_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU devices simulate GPUs, whose results only the host waits for."""
    monkeypatch.setattr(clock, "_runs_ahead", lambda device: not device.endswith(HOST))
    keras.utils.set_random_seed(1)
    build, x, y = MODELS["images"]
    strategy = strategies.create("mirrored", ["CPU:1", "CPU:2"])
    trainer = tfdist.Trainer(build, strategy=strategy)
    graphs = graphs_run_by(lambda: trainer.fit(x, y, batch_size=8, verbose=0))
    waits = []
    for graph in graphs:
        nodes = {node.name: node for node in graph.post_optimization_graph.node}
        for node in nodes.values():
            if node.op == "Timestamp":
                waits += [nodes[name.lstrip("^").partition(":")[0]] for name in node.input]
    assert any(node.op == "Assert" for node in waits)
    assert {node.device.rpartition("device:")[2] for node in waits} == {HOST}
