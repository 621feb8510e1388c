"""Reads who this process is from the environment variables of launchers and platforms.

`decide` reads every environment in `TABLE`, and uses the first one that applies. The order is that
of nesting: a launcher that starts the processes of a host comes before the one that started it.
The others must agree with it. `docs/clusters.md` has a row for each environment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from tfdist.cluster.environments import base, hints, slurm
from tfdist.cluster.environments.base import Environment
from tfdist.cluster.environments.tf_config import TfConfig, VertexAi
from tfdist.cluster.record import Cluster, Environ
from tfdist.errors import ClusterError

#: In order of precedence.
TABLE: Sequence[Environment] = (
    base.TORCHRUN,  # started by any of the following, on each host
    TfConfig(several=True),  # of tfdist's launcher, a user or a platform
    *base.MPI,
    base.PYTORCH_JOB,
    base.FLUX,
    slurm.Slurm(),
    base.PMI,
    base.TRAIN_JOB,
    base.SkyPilot(),
    base.DSTACK,
    base.LEADER_WORKER_SET,
    base.SageMaker(),
    base.Volcano(),
    VertexAi(),
    TfConfig(several=False),
)


class Reading(NamedTuple):
    """What an environment says.

    Attributes:
        variable: A variable without which the environment would not apply.
        cluster: What it says.
    """

    variable: str
    cluster: Cluster

    def __str__(self) -> str:
        return f"{self.cluster.source}: rank {self.cluster.rank} of {self.cluster.num_tasks}"


def readings(environ: Environ) -> list[Reading]:
    """Returns what each environment that applies says, in order of precedence.

    Raises:
        ClusterError: The variables of one are incomplete or inconsistent.
    """
    detected = ((environment, environment.detect(environ)) for environment in TABLE)
    return [Reading(name, environment.read(environ)) for environment, name in detected if name]


def decide(environ: Environ) -> Cluster:
    """Returns the cluster of the environment with the highest precedence.

    Raises:
        ClusterError: The variables of an environment are incomplete or inconsistent, or two
            environments disagree.
    """
    applicable = readings(environ)
    if not applicable:
        texts = (*hints.allocations(environ), *_hint_texts(environ, applicable))
        return Cluster("one process", rank=0, size=1, environments=texts)
    first, *others = applicable
    for other in others:
        is_shell = other.variable == slurm.RANK and slurm.is_interactive(environ)
        if not (is_shell or _agree(first.cluster, other.cluster)):
            raise ClusterError(
                f"{first}, but {other}. If {first.cluster.source} should connect all processes, "
                "start it once for all of them. Otherwise ignore one of the two: unset "
                f"{other.variable}, or unset {first.variable}."
            )
    texts = (f"{first} (used)", *map(str, others), *_hint_texts(environ, applicable))
    return dataclasses.replace(first.cluster, environments=texts if len(texts) > 1 else ())


def _agree(near: Cluster, far: Cluster) -> bool:
    """Returns whether an environment agrees with one of lower precedence.

    That one may describe the same processes, or those that started a part of them each: one, or one
    per host, or MPI's daemons. A launcher whose processes are all on this host has not connected
    those of the other, which would train separately.
    """
    if far.num_tasks == 1:
        return True
    if near.num_tasks == far.num_tasks:
        same_hosts = {_on_one_host(near), _on_one_host(far)} != {True, False}
        return (near.rank == far.rank and same_hosts) or bool(near.ps)
    if near.task == "evaluator":  # it is not counted
        return near.num_tasks + 1 == far.num_tasks
    return near.local_size < near.size and far.num_tasks < near.num_tasks


def _on_one_host(cluster: Cluster) -> bool | None:
    """Returns whether all workers are on this host; None if that is unknown."""
    if cluster.local_size == cluster.size:
        return True
    return False if cluster.addresses or cluster.local_size > 1 else None


def warning(environ: Environ) -> str:
    """Returns a warning if variables say that there are other processes or hosts; empty if not.

    Raises:
        ClusterError: As for `decide`.
    """
    cluster, hinted = decide(environ), _unexplained(environ, readings(environ))
    if cluster.rank or not hinted:
        return ""
    alone = "this process trains alone" if cluster.size == 1 else "all workers are on this host"
    return (
        f"{', '.join(hint.text for hint in hinted)}, but {alone} ({cluster.source}: rank "
        f"{cluster.rank} of {cluster.size}). To train on all of them, start the workers with srun, "
        "mpirun, torchrun or python -m tfdist.launch, or set TF_CONFIG. Otherwise ignore this, or "
        f"unset {hinted[0].variable}."
    )


def _hint_texts(environ: Environ, applicable: Sequence[Reading]) -> tuple[str, ...]:
    return tuple(f"{hint.text} (no rank)" for hint in _unexplained(environ, applicable))


def _unexplained(environ: Environ, applicable: Sequence[Reading]) -> list[hints.Hint]:
    """Returns the hints at more processes or hosts than the environments have."""
    if not applicable:
        return list(hints.read(environ)) or list(hints.indices(environ))
    cluster = applicable[0].cluster
    on_one_host = cluster.local_size == cluster.size
    # Other variables of an environment that was read are no news.
    families = {family for one in applicable if (family := one.variable.partition("_")[0])}
    return [
        hint
        for hint in hints.read(environ)
        if hint.variable.partition("_")[0] not in families
        and (hint.number > cluster.num_tasks or (hint.is_hosts and on_one_host))
    ]


def read_mpi(environ: Environ) -> Cluster | None:
    """Returns what the launcher of MPI programs says that started this process, if any."""
    launcher = next((one for one in (*base.MPI, base.PMI) if one.detect(environ)), None)
    return launcher.read(environ) if launcher else None
