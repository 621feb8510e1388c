"""The shared trace as on hosts with GPUs, where each call is optimized separately."""

from __future__ import annotations

from typing import Any

import keras
import pytest

import tfdist
from tests.conformance import engines, results
from tests.conformance.cases import CASES
from tests.gpu_paths.kernel_coverage import HOST, gpus_listed
from tests.gpu_paths.test_kernel_coverage import MODELS
from tfdist import strategies
from tfdist.step.shared_trace import SharedTrace
from tfdist.strategies import inner_loop
from tfdist.upstream.keras_model import use_xla_by_default_if
from tfdist.upstream.patching import replaced
from tfdist.upstream.tensorflow_graphs import graphs_run_by


@pytest.mark.parametrize(
    "name",
    [
        "uneven-batches",
        pytest.param("batch-norm", marks=pytest.mark.long),
        pytest.param("adam", marks=pytest.mark.long),
        pytest.param("embedding", marks=pytest.mark.long),
    ],
)
def test_matches_one_device(name: str) -> None:
    traced, trace = [], SharedTrace._trace

    def keep(self: SharedTrace, arguments: Any) -> Any:
        traced.append(trace(self, arguments))
        return traced[-1]

    no_xla = use_xla_by_default_if(lambda model: False)
    with gpus_listed(), replaced(SharedTrace, "_trace", keep), no_xla:
        result = engines.tfdist(CASES[name], "mirrored traced once", 2)
    assert any(one and not one.is_optimized for one in traced)
    assert not results.compare(result, engines.expected(name), CASES[name])


def test_clocks_wait_for_results_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU devices simulate GPUs, whose results only the host waits for."""
    monkeypatch.setattr(inner_loop, "_runs_ahead", lambda device: not device.endswith(HOST))
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
