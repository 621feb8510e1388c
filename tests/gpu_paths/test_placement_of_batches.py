"""A batch that was copied to its device ahead of time stays there until it is used.

Operations on Optionals have kernels for CPUs and for GPUs, of which those for CPUs have the higher
priority: an Optional without a device would take a batch back to the host.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import pytest
import tensorflow as tf
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended

from tests.gpu_paths import step_graph
from tests.gpu_paths.nccl_stand_in import NcclStandIn
from tests.gpu_paths.step_graph import StepGraphs
from tfdist.strategies import feed
from tfdist.strategies.base import Strategy
from tfdist.strategies.central_storage import CentralStorage
from tfdist.strategies.mirrored import Mirrored
from tfdist.strategies.multi_worker import MultiWorker
from tfdist.strategies.one_device import OneDevice

#: Without the default device of TensorFlow, which is CPU:0, or the first GPU on a host with GPUs.
DEVICES = ["CPU:1", "CPU:2"]
#: Operations that yield batches, and those that only pass a tensor on.
_SOURCES = ("IteratorGetNext", "OptionalGetValue")
_PASS_ON = {"Identity", "IdentityN", "Switch", "Merge", "Enter", "Exit", "NextIteration"}


def mirrored() -> Strategy:
    return Mirrored(DEVICES, prefetch_to_device=True)


def central_storage() -> Strategy:
    return CentralStorage(DEVICES, prefetch_to_device=True)


def multi_worker() -> Strategy:
    # Not `DEVICES`: TensorFlow numbers the groups of each such strategy from 1, so that one process
    # can have only one set of devices in all of its tests.
    strategy = MultiWorker(2)
    # As on GPUs.
    strategy.feed = feed.DevicePrefetch(strategy.devices, strategy.group, strategy._places)
    return strategy


def one_device() -> Strategy:
    return OneDevice(DEVICES[0])


def of_known_length() -> tf.data.Dataset:
    return step_graph.batches()


def of_unknown_length() -> tf.data.Dataset:
    return step_graph.batches().filter(lambda *_: True)


def endless() -> tf.data.Dataset:
    return step_graph.batches().repeat()


@pytest.fixture(autouse=True)
def devices_are_as_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefetches to a single CPU device, as to a GPU."""
    prefetched = feed.prefetched

    def to_device(dataset: tf.data.Dataset, devices: list[str]) -> tf.data.Dataset:
        if len(devices) == 1:
            return dataset.apply(tf.data.experimental.prefetch_to_device(devices[0]))
        return prefetched(dataset, devices)

    monkeypatch.setattr(feed, "prefetched", to_device)


def _marked(make: Callable[[], Strategy], data: Callable[[], tf.data.Dataset]) -> pytest.param:
    quick = (mirrored, of_unknown_length), (multi_worker, of_known_length)
    return pytest.param(
        make, data,
        marks=[] if (make, data) in quick else pytest.mark.long,
        id=f"{make.__name__}-{data.__name__}",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("make", "data"),
    [
        _marked(make, data)
        for make in (one_device, mirrored, central_storage, multi_worker)
        for data in (of_known_length, of_unknown_length, endless)
    ],
)
def test_batches_stay_on_their_devices(
    make: Callable[[], Strategy], data: Callable[[], tf.data.Dataset]
) -> None:
    strategy = make()
    steps = 2 if data is endless else None
    graphs = step_graph.step_graphs(strategy, step_graph.build_dense(), data(), steps)
    of_batches = [n for n in graphs.nodes() if n.op in _SOURCES or "Optional" in n.op]
    assert {_device(node) for node in of_batches} == set(strategy.devices)
    assert {_device(n) for n in of_batches if n.op in _SOURCES} == set(strategy.devices)
    assert not list(_departures(graphs))


def test_end_of_data_needs_no_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default TensorFlow sums before each step on finite data how many replicas have a batch."""
    monkeypatch.setattr(CollectiveAllReduceExtended, "_in_multi_worker_mode", lambda _: True)
    counts = []
    for data, steps in ((endless(), 2), (of_unknown_length(), None)):
        graphs = step_graph.step_graphs(multi_worker(), step_graph.build_dense(), data, steps)
        counts.append(sum(node.op.startswith("Collective") for node in graphs.nodes()))
    assert counts[0] > 0
    assert counts[0] == counts[1]


ACCUMULATES = functools.partial(keras.optimizers.SGD, gradient_accumulation_steps=2)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (ACCUMULATES, {"accumulate": 2}),
        pytest.param(ACCUMULATES, {}, marks=pytest.mark.long),
        pytest.param("sgd", {"accumulate": 2}, marks=pytest.mark.long),
        pytest.param("sgd", {"precision": "mixed_float16"}, marks=pytest.mark.long),
    ],
    ids=["both", "gradient-accumulation", "accumulate", "loss-scale"],
)
def test_only_sums_leave_a_device_within_a_step(optimizer: Any, options: dict[str, Any]) -> None:
    """Sums of `accumulate` and of the optimizer's accumulation stay on each replica's device."""
    strategy = NcclStandIn(DEVICES, prefetch_to_device=True)
    build = step_graph.build_dense(optimizer=optimizer)
    graphs = step_graph.step_graphs(strategy, build, of_unknown_length(), **options)
    floats = {tf.float32.as_datatype_enum, tf.float16.as_datatype_enum}
    sent = [
        node.input[0]
        for node in graphs.nodes()
        if node.op in ("_Send", "_HostSend") and node.attr["T"].type in floats
    ]
    # Control edges between devices are empty tensors, and metrics are read after the loop.
    assert not [name for name in sent if name.startswith("while/body") and "/ctrl/" not in name]


def _departures(graphs: StepGraphs) -> Iterator[str]:
    """Yields the nodes that send an unchanged float tensor of a batch to another device."""
    for nodes in graphs.by_device:
        takers = collections.defaultdict(list)
        for node in nodes:
            for taken in node.input:
                name, _, place = taken.partition(":")
                takers[name, int(place or 0)].append(node)
        left = [
            (node.name, place)
            for node in nodes
            if node.op in _SOURCES
            for place, dtype in enumerate(node.attr["output_types"].list.type)
            if dtype == tf.float32.as_datatype_enum
        ]
        while left:
            for taker in takers[left.pop()]:
                if taker.op in ("_Send", "_HostSend", "OptionalFromValue"):
                    yield f"{taker.op} {taker.name}"
                elif taker.op in _PASS_ON:
                    left += [(taker.name, place) for place in range(2)]


def _device(node: tf.compat.v1.NodeDef) -> str:
    result = tf.DeviceSpec.from_string(node.device)
    return f"{result.device_type}:{result.device_index}"
