"""The workers of a run, and the rank of this process. Imports no TensorFlow.

`discover` reads the environment variables of every supported launcher and platform. A process
without a launcher is a cluster of one worker: rank 0 of 1, the chief.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Sequence

from tfdist.cluster import deadline, environments, rendezvous
from tfdist.cluster.networks import bypass_proxy, free_ports
from tfdist.cluster.record import Cluster as Cluster
from tfdist.cluster.record import Environ, local_rank_and_size
from tfdist.errors import ClusterError

#: Long, because pods do not start at the same time, and pull their images first.
RENDEZVOUS_SECONDS = 300.0

_complete: set[Cluster] = set()  # clusters whose addresses have been exchanged
_in_use: Cluster | None = None
_hook: Callable[[], None] | None = None
_end_hook: Callable[[], None] | None = None


def discover(
    environ: Environ | None = None,
    *,
    workers: Sequence[str] = (),
    rank: int | None = None,
) -> Cluster:
    """Returns the cluster from the flags, or else from the variables of a launcher.

    The flags have precedence over `tfdist.cluster.environments`.

    Example:
        >>> cluster = tfdist.cluster.discover({}, workers=["a:2222", "b:2222"], rank=1)
        >>> cluster.rank, cluster.size, cluster.source
        (1, 2, 'flags')

    Args:
        environ: The environment variables; None: those of this process.
        workers: Value of `--workers`: `"host:port"` of each worker, by rank.
        rank: Value of `--rank`: the rank of this worker.

    Raises:
        ClusterError: The flags or variables are incomplete or inconsistent, or two environments
            disagree.
    """
    if workers:
        if rank is None or not 0 <= rank < len(workers):
            raise ClusterError(
                f"--workers lists {len(workers)} workers, but --rank is {rank}. Give each worker "
                f"a different --rank from 0 to {len(workers) - 1}."
            )
        local = local_rank_and_size(workers, rank)
        return Cluster("flags", rank, len(workers), *local, addresses=tuple(workers))
    if rank is not None:
        raise ClusterError(f"--rank {rank} needs --workers. Set both or neither.")
    return environments.decide(os.environ if environ is None else environ)


def exchange_addresses(
    cluster: Cluster,
    seconds: float = RENDEZVOUS_SECONDS,
    gpus: Sequence[str] = (),
    share_gpus: bool = False,
) -> Cluster:
    """Waits for all workers, and returns the cluster with the address of each.

    Every worker must call it before TensorFlow starts its servers. Later calls return immediately.
    Under mpirun, the workers exchange addresses over MPI. Otherwise they connect to rank 0, which
    also checks that all workers are present and have the same list of workers.

    Args:
        cluster: The result of `discover`.
        seconds: Maximum time to wait for the other workers.
        gpus: `cluster.gpus.identifiers` of the GPUs that this worker sees or requests. Workers that
            see the same GPUs divide them.
        share_gpus: Whether several workers may use the same GPU if there are too few.

    Raises:
        ClusterError: Workers are missing, have the same rank or different lists of workers, or
            cannot listen at their address; or not all processes are workers.
    """
    if cluster in _complete:
        return cluster
    if cluster.ps or cluster.task == "evaluator":
        raise ClusterError(
            f"{cluster.source} has parameter servers or an evaluator, but this strategy needs "
            "workers only. Remove them, or use --strategy parameter_server."
        )
    if cluster.addresses or cluster.master:
        with deadline.shown_as_waiting(cluster.rank):
            addresses, own_gpus = rendezvous.meet(cluster, seconds, gpus, share_gpus)
    elif cluster.size == 1:
        addresses, own_gpus = (f"localhost:{free_ports(1)[0]}",), list(range(len(gpus)))
    else:
        addresses, own_gpus = rendezvous.meet_over_mpi(cluster, gpus, share_gpus)
    local_rank, local_size = local_rank_and_size(addresses, cluster.rank)
    complete = dataclasses.replace(
        cluster,
        addresses=addresses,
        local_rank=local_rank,
        local_size=local_size,
        gpus=tuple(own_gpus),
    )
    bypass_proxy(addresses)
    _complete.add(complete)
    return complete


def current() -> Cluster:
    """Returns the cluster of the current strategy, or else the discovered one.

    Example:
        >>> tfdist.cluster.current().rank
        0
    """
    return _in_use or _discovered()


def use(cluster: Cluster) -> None:
    """Sets the cluster that `rank`, `size` and the other functions describe."""
    global _in_use
    _in_use = cluster


def leave() -> None:
    """Makes this process a cluster of one, even if a launcher started it.

    Example:
        >>> tfdist.cluster.leave()
    """
    use(Cluster("tfdist.cluster.leave()", rank=0, size=1))


def started_together() -> Cluster | None:
    """Returns the cluster in use if this process is one of several workers, else None.

    Raises:
        ClusterError: As for `discover`.
    """
    cluster = current()
    return None if cluster.size == 1 else cluster


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
    """Returns whether this worker is rank 0, which writes files and prints progress.

    Example:
        >>> if tfdist.is_chief():
        ...     print("rank 0 writes the files")
        rank 0 writes the files
    """
    return current().is_chief


def on_barrier(hook: Callable[[], None] | None) -> None:
    """Sets the function that `barrier` calls. Multi-process strategies call this."""
    global _hook
    _hook = hook


def barrier() -> None:
    """Waits until every worker has called it. Returns immediately with one worker.

    Example:
        >>> tfdist.barrier()  # returns when every worker has called it

    Raises:
        ClusterError: There are several workers, but no multi-process strategy exists.
    """
    if size() == 1:
        return
    if _hook is None:
        raise ClusterError(
            f"barrier() was called with {size()} workers, before a strategy connected them. Create "
            "a Trainer with a multi-process strategy first."
        )
    _hook()


def on_end(hook: Callable[[], None]) -> None:
    """Sets the function that `end` calls. Multi-process strategies call this."""
    global _end_hook
    _end_hook = hook


def end() -> None:
    """Waits, before this worker exits, until the other workers no longer need it."""
    if _end_hook is not None:
        _end_hook()


@functools.cache
def _discovered() -> Cluster:
    """Returns the cluster from the environment, which does not change while a process runs."""
    if text := environments.warning(os.environ):
        warnings.warn(text, stacklevel=2)
    return discover()
