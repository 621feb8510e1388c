"""Measures how long an all-reduce over the replicas takes, for several sizes.

This is a quick check; `tfdist bench allreduce` measures in detail.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import psutil

from tfdist import cluster, strategies
from tfdist.errors import ClusterError, TfdistError
from tfdist.tools.doctor.report import Check
from tfdist.tools.install_horovod import versions

if TYPE_CHECKING:
    from tfdist.strategies import Strategy

#: Sizes of the gradient, in MB of 10^6 bytes.
SIZES = (1, 4, 16, 64, 256)

#: Copies of the gradient in memory during an all-reduce, per replica.
_COPIES = 4


def checks() -> list[Check]:
    """Returns a check for each size.

    It uses Horovod if `mpirun` or `horovodrun` started this process, otherwise `mirrored` over the
    GPUs of the host, or over two logical CPU devices.
    """
    name = "horovod" if started_by_horovod() else "mirrored"
    if name == "mirrored" and (others := _others()):
        value = f"not measured over the {others.size} processes from {others.source}"
        fix = "run tfdist verify --strategy multi_worker in each process"
        return [Check("all-reduce", value, "missing", fix)]
    try:
        strategy = strategies.create(name)
    except TfdistError as error:
        return [Check("all-reduce", str(error), "wrong", "see the checks above")]
    if strategy.num_replicas == 1:
        return [Check("all-reduce", f"not measured: {name} has only one replica on this host")]
    available = psutil.virtual_memory().available / (_COPIES * len(strategy.devices))
    sizes = [size for size in SIZES if size * 1e6 * strategy.group.size < available]
    return [_line(strategy, size) for size in sizes]


def started_by_horovod() -> bool:
    """Returns whether this is one of several processes that Horovod can connect."""
    if versions.horovod() is None:
        return False
    by_gloo = int(os.environ.get("HOROVOD_SIZE", "1")) > 1  # set by horovodrun
    others = _others()
    return by_gloo or (others is not None and not (others.addresses or others.master))


def _others() -> cluster.Cluster | None:
    """Returns the workers started together; None if the group `processes` reports an error."""
    try:
        return cluster.started_together()
    except ClusterError:
        return None


def _line(strategy: Strategy, megabytes: int) -> Check:
    name = f"{strategy.name} x{strategy.num_replicas}, {megabytes} MB"
    from tfdist.groups.traffic import measure_all_reduce

    seconds, total = measure_all_reduce(strategy, int(megabytes * 1e6))
    if total != strategy.num_replicas:
        value = f"wrong result: the sum of {strategy.num_replicas} ones is {total}"
        return Check(name, value, "wrong", "train with another --strategy or --all-reduce")
    return Check(name, f"{seconds * 1e3:.1f} ms, {megabytes / 1e3 / seconds:.2f} GB/s")
