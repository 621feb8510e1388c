"""`python -m benchmarks allreduce`: `tfdist bench allreduce` with PyTorch's Gloo."""

from __future__ import annotations

import statistics
import time
from typing import Any

from jsonargparse import ArgumentParser

from tfdist import cluster
from tfdist.cluster.launcher.worker_pool import WorkerPool
from tfdist.cluster.networks import free_ports
from tfdist.tools.bench import allreduce
from tfdist.tools.bench.allreduce import Measure

DESCRIPTION = "bandwidth of sums over two replicas, with PyTorch's Gloo among the engines"


def by_torch(port: int) -> Measure:
    """In a worker: returns what sums with PyTorch's Gloo."""
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


ENGINES = allreduce.ENGINES | {
    "PyTorch, Gloo": lambda: WorkerPool(by_torch, free_ports(1)[0], pauses=True)
}


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    allreduce.add_arguments(parser, list(ENGINES))


def run(**flags: Any) -> None:
    """See `tfdist.tools.bench.allreduce.run`."""
    allreduce.run(known=ENGINES, **flags)
