"""Compiling kernels for a new GPU is not taken for a hang."""

from __future__ import annotations

import threading
from typing import Any

import keras
import pytest
import tensorflow as tf

import tfdist
from tests.conformance import engines, results
from tests.conformance.cases import CASES
from tests.gpu_paths.kernel_coverage import HOST, gpus_listed
from tests.gpu_paths.test_kernel_coverage import MODELS
from tfdist import strategies
from tfdist.cluster import deadline
from tfdist.cluster.watchdog.status import Report, State, Status
from tfdist.cluster.watchdog.verdict import COMPILE_SECONDS, verdict
from tfdist.step.shared_trace import SharedTrace
from tfdist.strategies import inner_loop
from tfdist.upstream.keras_model import use_xla_by_default_if
from tfdist.upstream.patching import replaced
from tfdist.upstream.tensorflow_graphs import graphs_run_by

LIMIT = 300.0


def reports(idle: float, compiling: bool) -> list[Report]:
    """Returns the reports of two workers that have been in their first step for `idle` seconds."""
    return [
        Report(
            rank=rank, num_calls=1, num_passed=1 - rank, place="the start of fit",
            state=State.RUNNING, idle=idle, silent=0, compiling=compiling,
        )
        for rank in range(2)
    ]  # fmt: skip


def test_first_step_on_gpus_may_take_half_an_hour() -> None:
    assert verdict(reports(1800.0, compiling=True), LIMIT) is None
    assert "has kept the others waiting" in str(verdict(reports(1800.0, compiling=False), LIMIT))
    assert "has kept the others waiting" in str(verdict(reports(COMPILE_SECONDS, True), LIMIT))


@pytest.mark.parametrize("on_gpus", [True, False])
def test_worker_compiles_until_the_first_step_of_a_task_is_done(on_gpus: bool) -> None:
    status = Status(0, on_gpus)

    def compiling(task: str) -> list[bool]:
        status.enter(task, LIMIT)
        before = status.report().compiling
        status.passed("step 1")
        after = status.report().compiling
        status.leave(State.OUTSIDE)
        return [before, after, status.report().compiling]

    assert compiling("fit") == [on_gpus, False, False]
    assert compiling("fit") == [False, False, False]
    assert compiling("predict") == [on_gpus, False, False]


@pytest.mark.parametrize(("num_gpus", "silent", "ends"), [(0, [], 1), (1, [], 0), (1, [3], 1)])
def test_start_up_on_gpus_ends_only_for_a_silent_rank(
    num_gpus: int, silent: list[int], ends: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []
    checked = threading.Event()

    def exit_now(reason: str) -> None:
        reasons.append(reason)
        checked.set()

    def look() -> list[int]:
        if num_gpus and not silent:
            checked.set()
        return silent

    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [object()] * num_gpus)
    monkeypatch.setattr(deadline, "exit_now", exit_now)
    monkeypatch.setattr(deadline, "SECONDS", 0.01)
    with deadline.waiting(0, 4, look):
        assert checked.wait(30.0)
    assert len(reasons) == ends
    assert all(("rank 3" in reason) == bool(silent) for reason in reasons)


# ---- shared trace ----


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
