"""Device meshes: which strategy computes on them, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from tests.support.case import compiled
from tests.support.training import FIT, TOLERANCE, building
from tfdist import strategies
from tfdist.config import TrainConfig
from tfdist.errors import ConfigurationError
from tfdist.groups import traffic
from tfdist.groups.base import LocalGroup
from tfdist.strategies.mesh import parse
from tfdist.trainer import Trainer

_MESHES = [
    ("data=1", "auto", 1, "one_device", 1),
    ("data=2", "auto", 1, "mirrored", 2),
    ("data=2", "auto", 2, "horovod", 1),
    ("data=2", "tensorflow", 2, "multi_worker", 1),
    ("data=4", "auto", 2, "multi_worker", 2),
    ("pipeline=2", "auto", 1, "pipeline", 2),
    ("data=2,pipeline=3", "auto", 2, "pipeline", 3),
    ("data=2,tensor=2", "tensorflow", 2, "tensor_parallel", 2),
    ("data=2, shard=2", "auto", 2, "sharded", 2),
    ("shard=2", "auto", 1, "sharded", 2),
    ("shard=2", "auto", 2, "sharded", 1),
    ("data=2,pipeline=1", "auto", 1, "mirrored", 2),
]


@pytest.mark.parametrize(("mesh", "group", "processes", "strategy", "devices"), _MESHES)
def test_mesh_selects_strategy_and_devices_of_each_process(
    mesh: str, group: str, processes: int, strategy: str, devices: int
) -> None:
    placed = parse(mesh).place(group, processes)
    assert (placed.strategy, placed.devices) == (strategy, devices)


@pytest.mark.parametrize(
    ("mesh", "group", "processes", "message"),
    [
        ("data=2,pipline=2", "auto", 2, "Did you mean pipeline"),
        ("data=two", "auto", 1, "size of at least 1"),
        ("data=2,data=2", "auto", 1, "each axis once"),
        ("pipeline=2,tensor=2", "auto", 1, "pipeline and tensor cannot be combined"),
        ("pipeline=2,data=2", "auto", 2, "Write data=2,pipeline=2"),
        ("data=2,shard=2", "auto", 1, "start 2 processes with python -m tfdist.launch"),
        ("shard=4", "auto", 2, "use shard=2, or data=2,shard=4"),
        ("data=3", "auto", 2, "a multiple of their number"),
        ("data=4", "horovod", 2, "use process_group='tensorflow'"),
    ],
)
def test_invalid_meshes_raise(mesh: str, group: str, processes: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse(mesh).place(group, processes)


def test_mesh_implies_strategy_and_devices() -> None:
    made = strategies.create(None, mesh={"pipeline": 2}, micro_batches=2)
    assert (made.name, len(made.devices)) == ("pipeline", 2)
    with pytest.raises(ConfigurationError, match="implies strategy 'mirrored', but"):
        strategies.create("towers", mesh="data=2")
    with pytest.raises(ConfigurationError, match="has 2 devices in each process"):
        strategies.create(None, 3, mesh="data=2")


def test_mesh_flag_selects_the_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TrainConfig(mesh="data=2").strategy == "mirrored"
    monkeypatch.setattr("tfdist.cluster.started_together", lambda: SimpleNamespace(size=2))
    assert TrainConfig(mesh="data=2,tensor=2").strategy == "tensor_parallel"
    assert TrainConfig(mesh="data=2", process_group="tensorflow").strategy == "multi_worker"
    with pytest.raises(ValueError, match="Did you mean pipeline"):
        TrainConfig(mesh="pipelin=2")


def _model_parallel(layouts: dict[str, tuple], shape: tuple[int, int] = (1, 2)) -> Any:
    names = [f"cpu:{i}" for i in range(shape[0] * shape[1])]
    mesh = keras.distribution.DeviceMesh(shape, ("batch", "model"), names)
    rules = keras.distribution.LayoutMap(mesh)
    for path, axes in layouts.items():
        rules[path] = axes
    return keras.distribution.ModelParallel(layout_map=rules)


def test_keras_distributions_match_one_device() -> None:
    def make_layers() -> list[Any]:
        hidden = keras.layers.Dense(4, activation="tanh", name="hidden")
        return [keras.Input((4,)), hidden, keras.layers.Dense(1)]

    build = building(make_layers, loss="mse")
    kernels = {".*hidden/kernel": (None, "model"), ".*hidden/bias": ("model",)}
    given = {
        "mirrored": keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"]),
        "tensor_parallel": _model_parallel(kernels),
        "sharded": keras.distribution.DeviceMesh((2,), ["shard"], ["cpu:0", "cpu:1"]),
    }
    layout = strategies.create(given["tensor_parallel"]).layout
    assert layout == {"^(?:.*hidden/kernel)$": [None, "model"]}
    expected = _weights(Trainer(build, "one_device"))
    for name, distribution in given.items():
        trainer = Trainer(build, distribution)
        assert trainer.strategy.name == name
        assert len(trainer.strategy.devices) == 2
        for found, wanted in zip(_weights(trainer), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def _weights(trainer: Trainer) -> list[np.ndarray]:
    trainer.fit(**FIT)
    return trainer.model.get_weights()


def test_keras_distributions_without_an_equivalent_raise() -> None:
    with pytest.raises(ConfigurationError, match="use strategy 'sharded'"):
        strategies.create(_model_parallel({"dense/kernel": ("batch", "model")}))
    with pytest.raises(ConfigurationError, match="start 2 processes"):
        strategies.create(_model_parallel({"dense/kernel": (None, "model")}, (2, 2)))
    with pytest.raises(ConfigurationError, match="The axes are data, pipeline, tensor, shard"):
        strategies.create(keras.distribution.DeviceMesh((2,), ["batch"], ["cpu:0", "cpu:1"]))


class _TwoHosts(LocalGroup):
    """The first of two processes, the other of which always has the same numbers."""

    size = 2

    def all_reduce(self, tensors: list) -> list:
        traffic.note("all-reduce", tensors)
        return tensors

    def gather_words(self, words: np.ndarray) -> np.ndarray:
        return np.stack([words, words])


def _wide() -> keras.Model:
    layers = [keras.layers.Dense(64, use_bias=False) for _ in range(2)]
    return compiled(keras.Sequential([keras.Input((64,)), *layers]))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sharded", {"shard": "gradients"}),
        ("sharded", {"shard": "parameters"}),
        ("tensor_parallel", {}),
        ("pipeline", {"micro_batches": 2}),
    ],
)
def test_devices_of_a_host_are_summed_before_hosts_exchange(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two devices per host send at most half of what each would send in a ring of all four."""
    joined = (["CPU:0", "CPU:1"], _TwoHosts())
    monkeypatch.setattr(f"tfdist.strategies.{name}.strategy.join_processes", lambda *_: joined)
    rows, num_steps = np.ones((8 * 3, 64), "float32"), 3
    with traffic.counted(2) as counted:
        # The other process does not exist, so that a watchdog would end this one.
        trainer = Trainer(_wide, strategies.create(name, 2, **options), watchdog_seconds=0)
        trainer.fit(rows, rows, batch_size=8, verbose=0)
    gradients = 4 * trainer.model.count_params()
    both_devices_in_a_ring = 2 * 2 * (4 - 1) / 4 * gradients
    sent = counted.num_bytes() / num_steps
    assert gradients <= sent < 1.01 * gradients
    assert sent <= both_devices_in_a_ring / 2
