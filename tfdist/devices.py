"""The devices of a process: its GPUs, or logical CPU devices on a host without GPUs."""

from __future__ import annotations

import functools
import os
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from pipelines.cores import num_bound_cores, num_cores
from tfdist import cluster, compile_cache
from tfdist.cluster import gpus as gpus_of_workers
from tfdist.cluster.remote import connection
from tfdist.errors import ConfigurationError, DeviceError
from tfdist.upstream.tensorflow_runtime import has_started

#: Number of logical CPU devices on a host without GPUs, unless the caller passes a number.
DEFAULT_CPU_REPLICAS = 2
#: More logical CPU devices cause a warning, unless there are enough cores. With 40 on two cores,
#: the first step of a small network takes a minute.
_MANY_CPUS = 32


def configure(num_devices: int = DEFAULT_CPU_REPLICAS) -> list[str]:
    """Prepares the devices of this process; call it before the first TensorFlow operation.

    GPUs get memory growth, so that several processes can share one. A host without GPUs gets
    `num_devices` logical CPU devices.

    Example:
        >>> tfdist.devices.configure(2)[:2]
        ['CPU:0', 'CPU:1']

    Returns:
        The names of the devices in TensorFlow, GPUs before CPUs.

    Raises:
        DeviceError: TensorFlow is already initialized with fewer logical CPU devices.
    """
    gpus = tf.config.get_visible_devices("GPU")
    for gpu in gpus:
        if tf.config.get_logical_device_configuration(gpu):
            continue  # memory growth cannot be combined with a memory limit
        try:
            tf.config.experimental.set_memory_growth(gpu, True)
        except RuntimeError:  # TensorFlow is initialized, and the setting cannot be changed
            break
    if not gpus:
        _split_cpu(num_devices)
    return available()


class GpuUse(NamedTuple):
    """What NVML reports of a GPU.

    Attributes:
        busy: Fraction of the last second, 0 to 1, in which a kernel ran.
        memory: Bytes in use, by all processes.
    """

    busy: float
    memory: int


def gpu_use() -> list[GpuUse]:
    """Returns the use of each GPU of this process; empty without GPUs or NVML (`nvidia-ml-py`).

    Example:
        >>> tfdist.devices.gpu_use()  # on a host without GPUs
        []
    """
    if (nvml := _nvml()) is None:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(n) for n in range(nvml.nvmlDeviceGetCount())]

    def use(name: str) -> GpuUse:
        by_index = name.isdigit()
        by = nvml.nvmlDeviceGetHandleByIndex if by_index else nvml.nvmlDeviceGetHandleByUUID
        handle = by(int(name) if by_index else name)
        busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        return GpuUse(busy, int(nvml.nvmlDeviceGetMemoryInfo(handle).used))

    try:
        return [use(name.strip()) for name in names]
    except nvml.NVMLError:  # such as a GPU instance (MIG), which has no utilization
        return []


@functools.cache
def _nvml() -> Any:
    """Returns NVIDIA's module `pynvml`, or None without it or its driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def rounds_float32() -> bool:
    """Returns whether GPUs use TensorFloat-32 for float32 matrix products (10-bit mantissa).

    Example:
        >>> tfdist.devices.rounds_float32()  # on a host without GPUs
        False
    """
    gpus = tf.config.get_visible_devices("GPU")
    return bool(gpus) and tf.config.experimental.tensor_float_32_execution_enabled()


def limit_memory(megabytes: int) -> None:
    """Limits the memory of each device; call it before the first TensorFlow operation.

    Without GPUs, the limit applies to all tensors of the process. TensorFlow then uses its GPU
    allocator for the CPU, because only this allocator supports a limit
    (`tensorflow/core/common_runtime/process_state.cc`).

    Example:
        >>> tfdist.devices.limit_memory(2048)

    Args:
        megabytes: The limit, in units of 2^20 bytes.

    Raises:
        DeviceError: TensorFlow is already initialized.
    """
    gpus = tf.config.get_visible_devices("GPU")
    try:
        for gpu in gpus:
            limit = tf.config.LogicalDeviceConfiguration(memory_limit=megabytes)
            tf.config.set_logical_device_configuration(gpu, [limit])
        if not gpus and has_started():
            raise RuntimeError
    except RuntimeError:
        raise DeviceError(
            f"Cannot limit memory to {megabytes} MB, because TensorFlow is already initialized. "
            "Call tfdist.devices.limit_memory before the first operation."
        ) from None
    if not gpus:
        os.environ |= {
            "TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(megabytes),
        }  # fmt: skip


def requested_gpus(devices: int | str | Sequence[str] | None) -> list[int]:
    """Returns the indices of the requested GPUs among the visible ones.

    Args:
        devices: As for `resolve`. Without names, all GPUs.
    """
    positions = list(range(len(tf.config.get_visible_devices("GPU"))))
    if devices is None or isinstance(devices, int):
        return positions
    names = set(_normalized(devices))
    return [i for i in positions if f"GPU:{i}" in names]


def use_gpus(positions: Sequence[int]) -> None:
    """Hides all other GPUs from this process. Call it before TensorFlow is initialized."""
    gpus = tf.config.get_visible_devices("GPU")
    tf.config.set_visible_devices([gpus[i] for i in positions], "GPU")


def available() -> list[str]:
    """Returns the names of the devices to compute on: all GPUs, or else all logical CPUs.

    Example:
        >>> tfdist.devices.available()[:2]
        ['CPU:0', 'CPU:1']
    """
    return _logical("GPU") or _logical("CPU")


def _logical(kind: str) -> list[str]:
    """Returns the names of the logical devices of a type, without initializing TensorFlow."""
    visible = tf.config.get_visible_devices(kind)
    configured = [
        tf.config.get_logical_device_configuration(device) or [None] for device in visible
    ]
    return [f"{kind}:{i}" for i in range(sum(map(len, configured)))]


def resolve(devices: int | str | Sequence[str] | None, default_cpus: int) -> list[str]:
    """Returns the names of the requested devices.

    Args:
        devices: None for all GPUs, or for `default_cpus` logical CPU devices on a host without
            GPUs; a number of devices; or names such as `"GPU:1"`. Names of devices of other
            hosts, such as `"host-b:2222/GPU:1"`, connect this process to their servers; of several
            processes that train together, each uses its part of the names.
        default_cpus: Number of logical CPU devices for None on a host without GPUs.

    Returns:
        Names in the same form, or TensorFlow's full names if a device is on another host.

    Raises:
        DeviceError: There are too few devices, or a device does not exist.
        ClusterError: A server of another host does not answer.
        ConfigurationError: CUDA_VISIBLE_DEVICES names a GPU twice.
    """
    gpus_of_workers.visible(os.environ)  # raises an error if a GPU occurs twice
    _limit_threads()
    if tf.config.list_physical_devices("GPU"):
        compile_cache.compile_in_parallel()
    if devices is None:
        try:
            configure(default_cpus)
        except DeviceError as error:
            # Fewer replicas give the same results, but more slowly.
            warnings.warn(f"{error} Continuing with {len(available())}.", stacklevel=3)
        names = available()
        return names if names[0].startswith("GPU") else names[:default_cpus]
    if isinstance(devices, int):
        if devices < 1:
            raise DeviceError(f"devices={devices}: expected at least 1.")
        configure(devices)
        names = available()
        if devices > len(names):
            raise DeviceError(
                f"devices={devices}, but only {len(names)} GPUs are visible to this process. "
                f"Use at most {len(names)}."
            )
        return names[:devices]
    if connection.names_remote(devices):
        return _with_remote(devices)
    names = _normalized(devices)
    if not names or len(set(names)) < len(names):
        raise DeviceError(f"devices={names}: expected one or more different names.")
    cpus = [
        int(number)
        for kind, _, number in (name.partition(":") for name in names)
        if kind == "CPU" and number.isdecimal()
    ]
    if cpus:
        _split_cpu(max(cpus) + 1)
    existing = _logical("CPU") + _logical("GPU")
    if unknown := [name for name in names if name not in existing]:
        raise DeviceError(
            f"Device {', '.join(unknown)} does not exist. Available devices: {', '.join(existing)}."
        )
    return names


def _with_remote(devices: str | Sequence[str]) -> list[str]:
    """Returns the full names of devices, of which some are of other hosts."""
    names = [devices] if isinstance(devices, str) else list(devices)
    started = cluster.started_together()
    if started is not None and not any(map(connection.is_remote, names)):
        each, left = divmod(len(names), started.size)
        if left:
            raise DeviceError(
                f"devices={names}: {len(names)} names of devices, some of other hosts, cannot be "
                f"divided over {started.size} processes. Name as many for each process."
            )
        parts = [names[rank * each : (rank + 1) * each] for rank in range(started.size)]
        # TensorFlow's server keeps objects that all clients share, and a client may free them.
        used = Counter(server for part in parts for server in connection.servers_of(part))
        if shared := [server for server, number in used.items() if number > 1]:
            raise DeviceError(
                f"Several processes would use the device server {', '.join(shared)}, but a server "
                "serves one process. Start a server for each process, at ports of their own and "
                "with GPUs of their own (CUDA_VISIBLE_DEVICES)."
            )
        names = parts[started.rank]
    if not connection.names_remote(names):
        return resolve(names, 1)
    local = [name for name in names if not connection.names_remote(name) and name[:5] != "/job:"]
    resolved = dict(zip(local, resolve(local, 1) if local else [], strict=True))
    full = connection.resolve([resolved.get(name, name) for name in names])
    if len(set(full)) < len(full):
        raise DeviceError(f"devices={names}: expected one or more different names.")
    return full


def refuse_remote(devices: object, what: str, reason: str) -> None:
    """Refuses devices of other hosts for what cannot use them.

    Raises:
        ConfigurationError: `devices` names some.
    """
    if connection.names_remote(devices):
        raise ConfigurationError(
            f"{what} cannot use devices of other hosts: {reason}. Use strategy 'pipeline', "
            "'tensor_parallel', 'sharded' or 'towers', over several processes with Horovod; or "
            "start a process on each host with python -m tfdist.launch."
        )


def _normalized(devices: str | Sequence[str]) -> list[str]:
    names = [devices] if isinstance(devices, str) else list(devices)
    return [name.upper().removeprefix("/").removeprefix("DEVICE:") for name in names]


def _limit_threads() -> None:
    """Makes TensorFlow use as many threads per operation as this process may use cores.

    By default it uses as many as the process is bound to, without regard to a container's limit.
    """
    cores = num_cores()
    is_set = tf.config.threading.get_intra_op_parallelism_threads()
    if cores < num_bound_cores() and not is_set and not has_started():
        tf.config.threading.set_intra_op_parallelism_threads(cores)


def _split_cpu(num_devices: int) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu)
    if num_devices <= len(configured or [None]):
        return
    cores = num_cores()
    if num_devices > max(_MANY_CPUS, 2 * cores):
        warnings.warn(
            f"{num_devices} logical CPU devices on {cores} CPU cores: the first step may take "
            f"minutes, and all steps are slower than with fewer devices. Use {cores} or fewer.",
            stacklevel=4,
        )
    try:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * num_devices
        )
    except RuntimeError:
        raise DeviceError(
            f"Expected {num_devices} logical CPU devices, but TensorFlow is already initialized "
            f"with {len(available())}. Call tfdist.devices.configure({num_devices}) before the "
            "first operation (such as building a model). In a notebook, restart the kernel, "
            "and move the cell that creates the Trainer above all that use TensorFlow or Keras."
        ) from None


def colocate_with_inputs(operation: tf.Operation) -> str:
    """Returns the operation's device, or else the device of its first input with a device.

    Pass it to `tf.compat.v1.device`, so that each weight is updated on the device that holds it.
    """
    devices = (tensor.device for tensor in operation.inputs)
    return operation.device or next((device for device in devices if device), "")
