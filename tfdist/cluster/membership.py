"""Who this process is among the workers of a run. Imports no TensorFlow.

`discover` reads the variables of every launcher. A process that no launcher has started is a
cluster of one: rank 0 of 1, the chief.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence

from tfdist.cluster import environments, rendezvous
from tfdist.cluster.networks import free_ports
from tfdist.cluster.record import Cluster as Cluster
from tfdist.cluster.record import Environ, local_place
from tfdist.errors import ClusterError

#: From what users set for one run to what platforms set for all.
_READERS = (
    environments.read_tf_config,
    environments.read_slurm,
    environments.read_mpi,
    environments.read_kubernetes,
)

#: Pods start one by one, and pull their images first.
RENDEZVOUS_SECONDS = 300.0

_complete: set[Cluster] = set()  # TensorFlow listens at their addresses
_in_use: Cluster | None = None
_hook: Callable[[], None] | None = None
_end_hook: Callable[[], None] | None = None


def discover(
    environ: Environ | None = None,
    *,
    workers: Sequence[str] = (),
    rank: int | None = None,
) -> Cluster:
    """Returns the cluster that the flags describe, or else that of the first launcher found.

    In this order: flags, TF_CONFIG, Slurm, Open MPI, MPICH / Hydra, Kubernetes, one process.

    Example:
        >>> cluster = tfdist.cluster.discover({}, workers=["a:2222", "b:2222"], rank=1)
        >>> cluster.rank, cluster.size, cluster.source
        (1, 2, 'flags')

    Args:
        environ: The variables; None: those of this process.
        workers: The flag `--workers`: `"host:port"` of each worker, by rank.
        rank: The flag `--rank`: this worker's rank.

    Raises:
        ClusterError: The flags or variables are incomplete or contradict each other.
    """
    if workers:
        if rank is None or not 0 <= rank < len(workers):
            raise ClusterError(
                f"--workers names {len(workers)} workers, but --rank is {rank}: give each worker "
                f"a rank of its own, from 0 to {len(workers) - 1}."
            )
        place = local_place(workers, rank)
        return Cluster("flags", rank, len(workers), *place, addresses=tuple(workers))
    if rank is not None:
        raise ClusterError(f"--rank {rank} without --workers: give both or neither.")
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
    """Returns the cluster with the address of every worker, after all workers have met.

    Every worker calls it before TensorFlow starts its servers; a later call returns at once. Under
    mpirun the workers exchange addresses over MPI; elsewhere they meet at rank 0's address, which
    also checks that all are there and agree about the cluster.

    Args:
        cluster: As `discover` returned it.
        seconds: How long to wait for the others.
        gpus: `cluster.gpus.identifiers` of the GPUs that this worker sees or asks for. Workers that
            see the same ones divide them.
        share_gpus: Whether several workers may use one GPU where there are too few.

    Raises:
        ClusterError: Workers are missing, have the same rank, disagree about the cluster, or cannot
            listen at their own address; or not all processes are workers.
    """
    if cluster in _complete:
        return cluster
    if cluster.ps or cluster.task == "evaluator":
        raise ClusterError(
            f"{cluster.source} has parameter servers or an evaluator, but this strategy needs "
            "workers only: leave them out, or use --strategy parameter_server."
        )
    if cluster.addresses or cluster.master:
        found, own = rendezvous.meet(cluster, seconds, gpus, share_gpus)
    elif cluster.size == 1:
        found, own = (f"localhost:{free_ports(1)[0]}",), list(range(len(gpus)))
    else:
        found, own = rendezvous.meet_over_mpi(cluster, gpus, share_gpus)
    local_rank, local_size = local_place(found, cluster.rank)
    whole = dataclasses.replace(
        cluster, addresses=found, local_rank=local_rank, local_size=local_size, gpus=tuple(own)
    )
    _complete.add(whole)
    return whole


def current() -> Cluster:
    """Returns the cluster in use: that of the running strategy, or else the discovered one.

    Example:
        >>> tfdist.cluster.current().rank
        0
    """
    return _in_use or _discovered()


def use(cluster: Cluster) -> None:
    """Sets the cluster of `rank`, `size` and the other functions."""
    global _in_use
    _in_use = cluster


def leave() -> None:
    """Makes this process a cluster of one, even if a launcher started it.

    Example:
        >>> tfdist.cluster.leave()
    """
    use(Cluster("tfdist.cluster.leave()", rank=0, size=1))


def started_together() -> Cluster | None:
    """Returns the cluster in use if this process is one of several workers.

    Returns:
        None for a single process; also if the variables contradict each other, or are those of
        Slurm's batch script, which runs once: a strategy of one process works all the same.
    """
    try:
        found = current()
    except ClusterError:
        return None
    alone = found.size == 1 or (_in_use is None and environments.is_batch_script(os.environ))
    return None if alone else found


def rank() -> int:
    """Returns this worker's rank, from 0; rank 0 is the chief.

    Example:
        >>> tfdist.rank()
        0
    """
    return current().rank


def size() -> int:
    """Returns the number of workers of the run.

    Example:
        >>> tfdist.size()
        1
    """
    return current().size


def is_chief() -> bool:
    """Tells whether this worker is rank 0, which writes files and prints progress.

    Example:
        >>> if tfdist.is_chief():
        ...     print("rank 0 writes the files")
        rank 0 writes the files
    """
    return current().is_chief


def on_barrier(hook: Callable[[], None] | None) -> None:
    """Sets the function that `barrier` calls; strategies of several processes call this."""
    global _hook
    _hook = hook


def barrier() -> None:
    """Waits until every worker has called it; returns at once with one worker.

    Example:
        >>> tfdist.barrier()  # returns when every worker has called it

    Raises:
        ClusterError: There are several workers, but no strategy of several processes is running.
    """
    if size() == 1:
        return
    if _hook is None:
        raise ClusterError(
            f"barrier() with {size()} workers, but no strategy connects them yet: create a Trainer "
            "with a strategy of several processes first."
        )
    _hook()


def on_end(hook: Callable[[], None]) -> None:
    """Sets the function that `end` calls; strategies of several processes call this."""
    global _end_hook
    _end_hook = hook


def end() -> None:
    """Lets the other workers finish what they need this one for, before it exits."""
    if _end_hook is not None:
        _end_hook()


@functools.cache
def _discovered() -> Cluster:
    """Returns what the environment says, which does not change while a process runs."""
    return discover()
