"""Device selection by number and by name, logical CPU devices, and memory limits."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import NUM_CPUS
from tests.support import gpus
from tests.support.starting import run
from tfdist import devices
from tfdist.callbacks import progress
from tfdist.errors import DeviceError

CPUS = [f"CPU:{i}" for i in range(NUM_CPUS)]


def test_lists_all_devices() -> None:
    assert devices.available() == CPUS
    assert devices.configure(2) == CPUS  # there are enough already


@pytest.mark.parametrize(
    ("devices_argument", "names"),
    [
        (None, CPUS[:2]),
        (1, CPUS[:1]),
        (NUM_CPUS, CPUS),
        ("CPU:1", ["CPU:1"]),
        (["cpu:3", "/device:CPU:0"], ["CPU:3", "CPU:0"]),
        (("/CPU:2",), ["CPU:2"]),
    ],
)
def test_resolves_devices(devices_argument: Any, names: list[str]) -> None:
    assert devices.resolve(devices_argument, default_cpus=2) == names


@pytest.mark.parametrize(
    ("devices_argument", "message"),
    [
        (0, "devices=0: expected at least 1"),
        (-2, "devices=-2: expected at least 1"),
        ([], "expected one or more different names"),
        (["CPU:1", "cpu:1"], r"\['CPU:1', 'CPU:1'\]: expected one or more different names"),
        (["CPU:9"], r"Expected 10 logical CPU devices, .*\.configure\(10\) before"),
        (9, r"Expected 9 logical CPU devices, .* initialized with 4\. Call tfdist\.devices"),
        (["GPU:0"], "Device GPU:0 does not exist. Available devices: CPU:0, CPU:1"),
        ("CPU:x", "Device CPU:X does not exist"),
        ("tpu", "Device TPU does not exist"),
    ],
)
def test_missing_devices_raise(devices_argument: Any, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        devices.resolve(devices_argument, default_cpus=2)


def test_many_more_logical_devices_than_cores_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with pytest.warns(UserWarning, match="500 logical CPU devices on 2 CPU cores"):  # noqa: SIM117
        with pytest.raises(DeviceError):  # TensorFlow has started
            devices.resolve(500, default_cpus=2)


FRESH = """
import tfdist
print(tfdist.devices.{first})
print(tfdist.devices.resolve(None, 2))
tfdist.devices.tf.constant(0)  # starts TensorFlow
try:
    tfdist.devices.resolve(5, 2)
except tfdist.errors.DeviceError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("first", "count"), [("configure(3)", 3), ("resolve(['CPU:2'], 2)", 3), ("resolve(None, 2)", 2)]
)
def test_creates_logical_devices_in_a_new_process(first: str, count: int) -> None:
    done = run(sys.executable, "-c", FRESH.replace("{first}", first))
    names, default, error = done.stdout.splitlines()
    assert str(CPUS[count - 1]) in names
    assert default == str(CPUS[:2])
    assert f"TensorFlow is already initialized with {count}" in error


def test_configuring_devices_before_building_the_model() -> None:
    code = """
import keras, tfdist
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
print(tfdist.Trainer(model, "mirrored", devices=3).strategy.devices)
"""
    message = " ".join(run(sys.executable, "-c", code, code=1).stderr.split())
    (call,) = re.findall(r"Call (tfdist\S+) before the first operation", message)
    done = run(sys.executable, "-c", code.replace("tfdist", f"tfdist\n{call}", 1))
    assert done.stdout.strip() == str(CPUS[:3])


LIMITED = """
import keras, numpy as np, tfdist
from tfdist import devices, errors

devices.limit_memory(64)
model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(256), keras.layers.Dense(1)])
model.compile("sgd", "mse")
trainer = tfdist.Trainer(model, strategy="one_device")
x = np.zeros((65536, 256), "float32")
trainer.fit(x[:64], x[:64, :1], verbose=0)
try:
    trainer.fit(x[:32768], x[:32768, :1], batch_size=32768, verbose=0)
except errors.OutOfMemoryError as error:
    print(error)
try:
    devices.limit_memory(32)
except errors.DeviceError as error:
    print(error)
"""


def test_memory_limit_without_gpus() -> None:
    full, advice, late = run(sys.executable, "-c", LIMITED).stdout.splitlines()
    assert full.startswith("out of memory: ")
    assert "smaller --batch-size" in advice
    assert late.startswith("Cannot limit memory to 32 MB")


def test_memory_limit_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[str, Any] = {}
    grows: list[str] = []
    config = devices.tf.config
    monkeypatch.setattr(config, "get_visible_devices", lambda kind: ["0", "1"])
    monkeypatch.setattr(config, "set_logical_device_configuration", limits.__setitem__)
    monkeypatch.setattr(config, "get_logical_device_configuration", limits.get)
    monkeypatch.setattr(config.experimental, "set_memory_growth", lambda gpu, on: grows.append(gpu))
    assert devices.configure() == ["GPU:0", "GPU:1"]
    assert grows == ["0", "1"]
    devices.limit_memory(1000)
    assert [each[0].memory_limit for each in limits.values()] == [1000, 1000]
    assert devices.configure() == ["GPU:0", "GPU:1"]
    assert grows == ["0", "1"]  # memory growth and a memory limit exclude each other


@pytest.mark.parametrize("number", [1, 2, 4, 8])
@pytest.mark.parametrize("visible", [None, "0", "3,1", "1,-1,0", ""])
def test_all_visible_gpus_are_used(
    number: int, visible: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = gpus.install(monkeypatch, number, visible)
    names = [f"GPU:{i}" for i in range(seen)]
    assert devices.resolve(None, default_cpus=2) == (names or CPUS[:2])
    if names:
        assert devices.resolve(1, default_cpus=2) == ["GPU:0"]
        assert devices.resolve(seen, default_cpus=2) == names
        assert devices.resolve([names[-1], "CPU:0"], default_cpus=2) == [names[-1], "CPU:0"]
        with pytest.raises(DeviceError, match=f"only {seen} GPUs are visible"):
            devices.resolve(seen + 1, default_cpus=2)
    with pytest.raises(
        DeviceError, match=f"Device GPU:{seen} does not exist. Available devices: CPU:0"
    ):
        devices.resolve(f"GPU:{seen}", default_cpus=2)


def test_gpus_get_memory_growth_without_splitting_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.install(monkeypatch, 4, "2,3")
    grows: list[str] = []
    config = devices.tf.config
    monkeypatch.setattr(
        config.experimental, "set_memory_growth", lambda gpu, on: grows.append(gpu.name)
    )
    monkeypatch.setattr(config, "set_logical_device_configuration", pytest.fail)
    assert devices.configure(8) == ["GPU:0", "GPU:1"]
    assert grows == ["/physical_device:GPU:0", "/physical_device:GPU:1"]


ADAPTED = """
import keras
import tfdist
words = keras.layers.TextVectorization(9)
words.adapt(["a b", "c"])
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
print(tfdist.Trainer(model, "mirrored", devices=3).strategy.devices)
"""


def test_script_that_names_its_devices_may_use_tensorflow_first(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ADAPTED)
    assert run(sys.executable, str(script)).stdout.strip() == str(CPUS[:3])


@pytest.mark.parametrize(("num_cores", "is_set", "expected"), [(1, 0, [1]), (2, 0, []), (1, 4, [])])
def test_threads_follow_the_cores_of_the_process(
    num_cores: int, is_set: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(devices, "num_cores", lambda: num_cores)
    monkeypatch.setattr(devices, "has_started", lambda: False)
    threading = devices.tf.config.threading
    monkeypatch.setattr(threading, "get_intra_op_parallelism_threads", lambda: is_set)
    monkeypatch.setattr(threading, "set_intra_op_parallelism_threads", calls.append)
    devices._limit_threads()
    assert calls == expected


def _nvml_of_two_gpus() -> Any:
    """Returns the parts of NVIDIA's `pynvml` that are used; GPU 9 has no utilization."""

    def utilization(handle: int) -> Any:
        if handle == 9:
            raise OSError
        return SimpleNamespace(gpu=40 + 20 * handle)

    return SimpleNamespace(
        NVMLError=OSError,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=lambda uuid: int(uuid[-1]),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=(handle + 1) * 10**9),
        nvmlDeviceGetUtilizationRates=utilization,
    )


@pytest.mark.parametrize(
    ("visible", "busy"), [(None, [0.4, 0.6]), ("1", [0.6]), ("GPU-1, 0", [0.6, 0.4]), ("9", [])]
)
def test_use_of_gpus_is_what_nvml_reports(
    visible: str | None, busy: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_nvml", _nvml_of_two_gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    used = devices.gpu_use()
    assert [one.busy for one in used] == busy
    if visible == "1":
        assert progress.pace(0.01, 100.0, 0.0, used[0]).endswith(" - GPU 60 %, 2 GB")
