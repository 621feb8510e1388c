"""Properties of strategies besides their results."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.support.starting import python
from tests.support.training import FIT, X, assert_close, assert_same_weights, build, reference
from tfdist import cluster
from tfdist.cluster import membership
from tfdist.errors import ConfigurationError, DeviceError
from tfdist.strategies.central_storage import CentralStorage
from tfdist.strategies.mirrored import Mirrored
from tfdist.strategies.one_device import OneDevice


def trained(strategy: Any, **options: Any) -> keras.Model:
    trainer = tfdist.Trainer(build, strategy=strategy, **options)
    trainer.fit(**FIT, epochs=2)
    return trainer.model


@pytest.mark.parametrize(
    "make",
    [
        lambda: Mirrored(2, all_reduce="hierarchical_copy"),
        lambda: Mirrored(4, all_reduce="hierarchical_copy"),
        lambda: Mirrored(2, merge_on="cpu"),
        lambda: Mirrored(3, prefetch_to_device=True),
        lambda: CentralStorage(2, parameter_device="CPU:3"),
        lambda: CentralStorage(3, prefetch_to_device=True),
        lambda: Mirrored(["CPU:3", "CPU:1"]),
    ],
)
def test_options_do_not_change_results(make: Any) -> None:
    assert_same_weights(trained(make()), reference())


def test_several_models_under_one_strategy_object() -> None:
    strategy = Mirrored(2)
    first, second = (tfdist.Trainer(build, strategy=strategy) for _ in range(2))
    for _ in range(2):  # alternately
        for trainer in (first, second):
            trainer.fit(**FIT)
    assert_close(first.model.get_weights(), second.model.get_weights())


def test_central_storage_keeps_parameters_on_one_device() -> None:
    model = trained(CentralStorage(2, parameter_device="CPU:2"))
    assert {v.value.device[-5:] for v in model.trainable_variables} == {"CPU:2"}


def test_towers_leave_no_thread_behind() -> None:
    before = set(threading.enumerate())
    trained("towers", devices=3)
    left = [t for t in set(threading.enumerate()) - before if "build" in t.name]
    assert not left


def test_failing_tower_stops_all() -> None:
    towers = tfdist.strategies.create("towers", 3)

    def fail_on_tower_1(index: int) -> Any:
        towers.all_reduce([tf.constant(1.0)])
        if index == 1:
            raise KeyError("tower 1")
        return towers.all_reduce([tf.constant(2.0)])

    before = set(threading.enumerate())
    with pytest.raises(KeyError, match="tower 1"):
        towers.run(fail_on_tower_1)
    assert not set(threading.enumerate()) - before


def test_one_device_with_several_devices_raises() -> None:
    with pytest.raises(ConfigurationError, match="'one_device' computes on one device per process"):
        tfdist.strategies.create("one_device", 2)
    with pytest.raises(
        ConfigurationError, match="'of_a_user' computes on one device per process, but got"
    ):
        type("OfAUser", (OneDevice,), {"name": "of_a_user"})(3)


@pytest.mark.parametrize("is_created", [False, True])
def test_single_process_strategy_in_a_cluster_raises(
    is_created: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = Mirrored(2) if is_created else "mirrored"
    monkeypatch.setattr(membership, "_in_use", cluster.Cluster("Open MPI", 1, 2))
    with pytest.raises(ConfigurationError, match="Open MPI started 2 processes") as refused:
        tfdist.Trainer(build, strategy)
    assert "tfdist.cluster.leave()" in str(refused.value)
    tfdist.cluster.leave()  # the suggested fix
    assert tfdist.Trainer(build, strategy).strategy.num_replicas == 2
    assert (tfdist.rank(), tfdist.size()) == (0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"all_reduce": "ring"}, "expected one of auto, nccl"),
        ({"all_reduce": "nccl"}, "requires GPUs"),
        ({"merge_on": "gpu"}, "no device is a GPU"),
        ({"merge_on": "cpu", "all_reduce": "hierarchical_copy"}, "use all_reduce='one_device'"),
    ],
)
def test_invalid_all_reduce_options_raise(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Mirrored(2, **options)


def test_missing_parameter_device_raises() -> None:
    with pytest.raises(DeviceError, match="Device GPU:0 does not exist"):
        CentralStorage(2, parameter_device="GPU:0")


def test_model_loads_in_plain_keras_without_tfdist(tmp_path: Path) -> None:
    model = trained("mirrored", devices=2)
    model.save(tmp_path / "model.keras")
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", model(X))
    script = (
        "import sys; sys.modules['tfdist'] = None\n"
        "import keras, numpy as np\n"
        "model = keras.saving.load_model('model.keras')\n"
        "x, y = np.load('x.npy'), np.load('y.npy')\n"
        "np.testing.assert_allclose(model.predict(x, verbose=0), y, rtol=1e-5, atol=1e-6)\n"
        "model.fit(x, y, verbose=0)\n"
    )
    python("-c", script, cwd=tmp_path)
