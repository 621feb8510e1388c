"""The engines that are compared: how their workers are started, and what those measure."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from tfdist import cluster
from tfdist.cluster import mpi_library
from tfdist.cluster.ports import free_ports
from tfdist.launcher.worker_pool import WorkerPool

#: Takes a number of bytes and of repeats; returns the median time of a sum in seconds.
Measure = Callable[[int, int], float]

REPLICAS = 2


def of_tfdist(strategy: str, devices: int) -> Measure:
    """In a worker: starts a strategy, and sums through it."""
    from tfdist import strategies
    from tfdist.strategies.collectives.bandwidth import measure

    made = strategies.create(strategy, devices)
    return lambda num_bytes, repeats: measure(made, num_bytes, repeats)[0]


def of_torch(port: int) -> Measure:
    """In a worker: starts PyTorch's Gloo, and sums through it."""
    import torch
    import torch.distributed as dist

    me = cluster.discover()
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=me.rank, world_size=me.size
    )

    def measure(num_bytes: int, repeats: int) -> float:
        tensor, times = torch.zeros(num_bytes // 4), []
        dist.all_reduce(tensor)
        for _ in range(repeats):
            began = time.perf_counter()
            dist.all_reduce(tensor)
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    return measure


def _tfdist(strategy: str, devices: int = 1, **options: Any) -> Callable[[], WorkerPool]:
    return lambda: WorkerPool(of_tfdist, strategy, devices, **options)


def _torch() -> WorkerPool:
    return WorkerPool(of_torch, free_ports(1)[0], pauses=True)


#: How to start each, by its name in the tables.
ENGINES: dict[str, Callable[[], WorkerPool]] = {
    "mirrored": _tfdist("mirrored", REPLICAS, num_workers=1, pauses=True),
    "multi_worker": _tfdist("multi_worker"),
    "Horovod, MPI": _tfdist("horovod", via="mpirun", pauses=True),
    "Horovod, Gloo": _tfdist("horovod"),
    "PyTorch, Gloo": _torch,
}


def missing(engine: str) -> str:
    """Returns what an engine lacks on this machine, or nothing."""
    if "Horovod" in engine and find_spec("horovod") is None:
        return "Horovod is not installed"
    if "MPI" in engine and mpi_library.find() is None:
        return "no MPI is installed"
    if "PyTorch" in engine and find_spec("torch") is None:
        return "PyTorch is not installed"
    return ""
