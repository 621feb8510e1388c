"""Which operations of a graph have no GPU kernel, by the registry of the installed TensorFlow.

The graphs are those of runs on logical CPU devices: what a strategy puts on the device of a
replica, which is never the first one here, it would put on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.upstream.patching import replaced
from tfdist.upstream.tensorflow_graphs import graphs_run_by
from tfdist.upstream.tensorflow_runtime import dtypes_of, gpu_kernel

#: The device of operations without a requested device: in these graphs, the host's.
HOST = "CPU:0"

#: Operations without a GPU kernel that a strategy may put on a GPU, with their dtypes, and the
#: reasons. Strings, step counters and the operations that read datasets are always on the host.
ALLOWED = {
    "SplitV(T=int64, Tlen=int32)": (
        "counters of metrics, a few bytes: TensorFlow's hierarchical copy and NCCL all-reduces "
        "pack and split tensors of any dtype"
    ),
}


class Operation(NamedTuple):
    """An operation of a graph.

    Attributes:
        kind: Its type, such as `"MatMul"`.
        dtypes: Its attributes that are dtypes, by name: `(("T", "float32"),)`.
        device: Where it ran, such as `"CPU:1"`.
    """

    kind: str
    dtypes: tuple[tuple[str, str], ...]
    device: str

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(f'{name}={dtype}' for name, dtype in self.dtypes)})"


@contextmanager
def gpus_listed() -> Iterator[None]:
    """Inside the context, TensorFlow lists two physical GPUs."""
    plain = tf.config.list_physical_devices
    gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(2)]

    def listed(kind: str | None = None) -> list[Any]:
        return gpus if kind == "GPU" else plain(kind)

    with replaced(tf.config, "list_physical_devices", listed):
        yield


@contextmanager
def not_optimized() -> Iterator[None]:
    """Inside the context, TensorFlow places and inlines graphs, but does not optimize them.

    On CPUs it would fuse operations into some that only CPUs have.
    """
    optimizer = tf.config.optimizer
    optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        optimizer.set_experimental_options({"disable_meta_optimizer": False})


def without_kernel(run: Callable[[], object]) -> dict[str, list[str]]:
    """Returns the operations of a run that would be on a GPU and have no kernel for it.

    Args:
        run: Runs functions of TensorFlow, on devices other than the first.

    Returns:
        By device, operations with their dtypes, without those in `ALLOWED`. A device whose
        operations all have kernels has an empty list.
    """
    results: dict[str, set[str]] = {}
    with gpus_listed(), not_optimized():
        ran = list(operations(run))
    for operation in ran:
        if operation.device != HOST:
            of_device = results.setdefault(operation.device, set())
            has_kernel = gpu_kernel(operation.kind, operation.dtypes) is not None
            if not has_kernel and str(operation) not in ALLOWED:
                of_device.add(str(operation))
    return {device: sorted(names) for device, names in sorted(results.items())}


def operations(run: Callable[[], object]) -> Iterator[Operation]:
    """Yields the operations that TensorFlow ran in functions, as placed and inlined."""
    for graph in graphs_run_by(run):
        for node in graph.post_optimization_graph.node:
            yield Operation(node.op, dtypes_of(node), node.device.rpartition("device:")[2])
