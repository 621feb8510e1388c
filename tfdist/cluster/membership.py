"""Who this process is among the workers of a run. Imports no TensorFlow.

Launchers tell it in their own ways: `discover` knows them. A process that none has started is a
cluster of one: rank 0 of 1, the chief.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence

from tfdist.cluster.environments import kubernetes, mpi, slurm, tf_config
from tfdist.cluster.ports import free_ports
from tfdist.cluster.record import Cluster as Cluster
from tfdist.cluster.record import Environ, local_place
from tfdist.cluster.rendezvous import over_mpi, server
from tfdist.errors import ClusterError

#: From what a user wrote for this run to what a platform sets for all.
_READERS = (tf_config.read, slurm.read, mpi.read, kubernetes.read)

#: Pods and jobs start one by one, and pull their images first.
RENDEZVOUS_SECONDS = 300.0

_complete: set[Cluster] = set()  # TensorFlow listens there now
_in_use: Cluster | None = None
_hook: Callable[[], None] | None = None
_end_hook: Callable[[], None] | None = None


def discover(
    environ: Environ | None = None,
    *,
    workers: Sequence[str] = (),
    rank: int | None = None,
) -> Cluster:
    """Returns the cluster that the flags describe, or else the first launcher that left its mark.

    In this order: flags, TF_CONFIG, Slurm, Open MPI, MPICH / Hydra, Kubernetes, one process.

    Args:
        environ: The variables; None: those of this process.
        workers: The flag: `"host:port"` of each worker, by rank.
        rank: The flag: this worker's number.

    Raises:
        ClusterError: What was found is incomplete or contradicts itself.
    """
    if workers:
        if rank is None or not 0 <= rank < len(workers):
            raise ClusterError(
                f"{len(workers)} workers are named, and rank {rank} for this one: "
                f"give each its own, from 0 to {len(workers) - 1}."
            )
        place = local_place(workers, rank)
        return Cluster("flags", rank, len(workers), *place, addresses=tuple(workers))
    if rank is not None:
        raise ClusterError(f"Rank {rank} without the workers' addresses: give both, or neither.")
    for read in _READERS:
        if found := read(os.environ if environ is None else environ):
            return found
    return Cluster("one process", rank=0, size=1)


def exchange_addresses(
    cluster: Cluster,
    seconds: float = RENDEZVOUS_SECONDS,
    gpus: Sequence[str] = (),
    share_gpus: bool = False,
) -> Cluster:
    """Returns the cluster with the address of every worker, after all workers have come together.

    Called by every worker of a cluster of workers, before TensorFlow starts its servers; after that
    it returns what it has returned before. Under mpirun the addresses cross over MPI; elsewhere the
    workers come together at rank 0's address, which also shows that all are there and agree about
    who they are.

    Args:
        cluster: As `discover` returned it.
        seconds: How long to wait for the others.
        gpus: `cluster.gpus.identifiers` of the GPUs that this worker sees or asks for. Workers that
            see the same ones divide them.
        share_gpus: Whether several workers may use one GPU where there are too few.

    Raises:
        ClusterError: Workers did not come in time, claim one rank, disagree about the cluster, or
            cannot listen at their own address; or not all are workers.
    """
    if cluster in _complete:
        return cluster
    if cluster.ps or cluster.task == "evaluator":
        raise ClusterError(
            f"{cluster.source} has parameter servers or an evaluator, and all are to do the same: "
            "leave them out, or use --strategy parameter_server."
        )
    if cluster.addresses or cluster.master:
        found, own = server.meet(cluster, seconds, gpus, share_gpus)
    elif cluster.size == 1:
        found, own = (f"localhost:{free_ports(1)[0]}",), list(range(len(gpus)))
    else:
        found, own = over_mpi.meet(cluster, gpus, share_gpus)
    local_rank, local_size = local_place(found, cluster.rank)
    whole = dataclasses.replace(
        cluster, addresses=found, local_rank=local_rank, local_size=local_size, gpus=tuple(own)
    )
    _complete.add(whole)
    return whole


def current() -> Cluster:
    """Returns the cluster in use: what the running strategy set, or else what is discovered."""
    return _in_use or _discovered()


def use(cluster: Cluster) -> None:
    """Makes a cluster the one that `rank`, `size` and the rest answer for."""
    global _in_use
    _in_use = cluster


def leave() -> None:
    """Makes this process a cluster of one: it trains by itself, whatever a launcher started."""
    use(Cluster("tfdist.cluster.leave()", rank=0, size=1))


def started_together() -> Cluster | None:
    """Returns the cluster in use where this process is one of several that do the same.

    Returns:
        None for a process alone; and where the variables contradict themselves, or are those of
        Slurm's batch script, which runs once whatever the job may start: who wants no others need
        not mind.
    """
    try:
        found = current()
    except ClusterError:
        return None
    alone = found.size == 1 or (_in_use is None and slurm.is_batch_script(os.environ))
    return None if alone else found


def rank() -> int:
    """Returns this worker's number, from 0; rank 0 is the chief."""
    return current().rank


def size() -> int:
    """Returns the number of workers of the run."""
    return current().size


def is_chief() -> bool:
    """Tells whether this worker is rank 0, the one that writes and talks."""
    return current().is_chief


def on_barrier(hook: Callable[[], None] | None) -> None:
    """Sets how `barrier` waits; the running strategy knows."""
    global _hook
    _hook = hook


def barrier() -> None:
    """Waits until every worker has come here; with one worker there is nothing to wait for.

    Raises:
        ClusterError: There are several, but no strategy runs that joins them.
    """
    if size() == 1:
        return
    if _hook is None:
        raise ClusterError(
            f"barrier() of {size()} workers, but nothing joins them yet: "
            "make a Trainer with a strategy of several processes first."
        )
    _hook()


def on_end(hook: Callable[[], None]) -> None:
    """Sets what `end` does; the running strategy knows."""
    global _end_hook
    _end_hook = hook


def end() -> None:
    """Lets the others finish what they need this worker for, when it has nothing left to do."""
    if _end_hook is not None:
        _end_hook()


@functools.cache
def _discovered() -> Cluster:
    """What the environment says; it does not change while a process runs."""
    return discover()
