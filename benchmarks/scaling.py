"""`python -m benchmarks scaling`: `tfdist bench scaling` with PyTorch's DDP over Gloo."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jsonargparse import ArgumentParser

from tfdist import cluster
from tfdist.cluster.launcher.worker_pool import WorkerPool
from tfdist.cluster.networks import free_ports
from tfdist.tools.bench import scaling
from tfdist.tools.bench.scaling import BY_HAND, RIVAL, Engine, Measure

DESCRIPTION = "two processes of one core each, with PyTorch's DDP among the engines"


def by_torch(port: int, joined: bool, tiny: bool) -> Measure:
    """In a worker: returns what trains the same networks with PyTorch; `joined`: with DDP."""
    scaling.use_own_core()
    from benchmarks import torch_training

    if joined:
        me = cluster.discover()
        torch_training.join(f"127.0.0.1:{port}", me.rank, me.size)
    prepared = functools.cache(
        lambda model: torch_training.prepare(scaling.workload(model, tiny), joined)
    )
    return lambda model, way, num_steps: prepared(model)(num_steps)


def _workers(joined: bool, num_workers: int) -> Callable[[bool], WorkerPool]:
    def start(tiny: bool) -> WorkerPool:
        port = free_ports(1)[0]
        return WorkerPool(by_torch, port, joined, tiny, num_workers=num_workers, pauses=True)

    return start


_ALONE, _APART = "PyTorch, one process", "PyTorch, two apart"
ENGINES = scaling.ENGINES | {
    _ALONE: Engine(_workers(False, 1), (BY_HAND,), _ALONE, _ALONE),
    _APART: Engine(_workers(False, 2), (BY_HAND,), _APART, _ALONE),
    RIVAL: Engine(_workers(True, 2), (BY_HAND,), _APART, _ALONE),
}


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    scaling.add_arguments(parser, list(ENGINES))


def run(**flags: Any) -> None:
    """See `tfdist.tools.bench.scaling.run`."""
    scaling.run(known=ENGINES, **flags)
