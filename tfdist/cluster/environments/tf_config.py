"""`TF_CONFIG`, which tfdist's launcher, users and platforms set; and Vertex AI's `CLUSTER_SPEC`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from tfdist.cluster.record import Cluster, Environ, check_distinct, local_rank_and_size
from tfdist.errors import ClusterError

_VARIABLE = "TF_CONFIG"


class _Tasks(BaseModel):
    model_config = ConfigDict(extra="forbid")
    chief: list[str] = Field([], max_length=1)
    worker: list[str] = []
    ps: list[str] = []
    evaluator: list[str] = []


class _Task(BaseModel):
    type: Literal["chief", "worker", "ps", "evaluator"]
    index: NonNegativeInt


class _Config(BaseModel):
    cluster: _Tasks
    task: _Task


@dataclass(frozen=True)
class TfConfig:
    """`TF_CONFIG` with several tasks, or with one.

    Platforms set it with one task for a container in which a launcher may start several processes,
    so one task has the lowest precedence.

    Attributes:
        several: Whether this environment applies to several tasks; otherwise, to one.
    """

    several: bool
    name: str = _VARIABLE

    def detect(self, environ: Environ) -> str:
        """Returns the variable if it has so many tasks. An empty one counts as not set."""
        if not environ.get(_VARIABLE, "").strip().strip("{} "):
            return ""
        return _VARIABLE if (self.read(environ).num_tasks > 1) == self.several else ""

    def read(self, environ: Environ) -> Cluster:
        """Returns the cluster.

        Raises:
            ClusterError: It does not have the format of TensorFlow's guide on multi-worker
                training, or is inconsistent.
        """
        try:
            config = _Config.model_validate_json(environ[_VARIABLE])
        except ValidationError as error:
            raise ClusterError(
                f"TF_CONFIG: {first_error(error)}; expected "
                '{"cluster": {"worker": ["host:port", ...]}, '
                '"task": {"type": "worker", "index": 0}}.'
            ) from None
        return _from_config(config.cluster, config.task)


def _from_config(tasks: _Tasks, task: _Task) -> Cluster:
    """Returns the cluster of a validated configuration, whose parts may be inconsistent."""
    workers = (*tasks.chief, *tasks.worker)
    if not workers:
        raise ClusterError('TF_CONFIG has no "worker" or "chief" task: add one.')
    check_distinct(_VARIABLE, (*workers, *tasks.ps, *tasks.evaluator))
    num_tasks = len(getattr(tasks, task.type))
    # TensorFlow omits the evaluator from the cluster, because no other task connects to it.
    is_evaluator = task.type == "evaluator" and not num_tasks and not task.index
    if task.index >= num_tasks and not is_evaluator:
        raise ClusterError(
            f"TF_CONFIG: task {task.type} {task.index}, but the cluster has {num_tasks} tasks of "
            f"that type. Use an index from 0 to {num_tasks - 1}."
            if num_tasks
            else f"TF_CONFIG: task {task.type} {task.index}, but the cluster has no such task."
        )
    first = {
        "chief": 0,
        "worker": len(tasks.chief),
        "ps": len(workers),
        "evaluator": len(workers) + len(tasks.ps),
    }
    rank = first[task.type] + task.index
    local = local_rank_and_size(workers, rank) if rank < len(workers) else (0, 1)
    return Cluster(
        _VARIABLE,
        rank,
        len(workers),
        *local,
        addresses=workers,
        task=task.type,
        ps=tuple(tasks.ps),
        has_chief=bool(tasks.chief),
    )


class _PoolTask(BaseModel):
    type: str
    index: NonNegativeInt


class _Spec(BaseModel):
    cluster: dict[str, list[str]]
    task: _PoolTask


class VertexAi:
    """Vertex AI's `CLUSTER_SPEC`: worker pools 0 and 1 are workers."""

    name = "Vertex AI"

    def detect(self, environ: Environ) -> str:
        """Returns the variable if it is set."""
        return "CLUSTER_SPEC" if environ.get("CLUSTER_SPEC", "").lstrip()[:1] == "{" else ""

    def read(self, environ: Environ) -> Cluster:
        """Returns the cluster.

        Raises:
            ClusterError: It does not have the format of Vertex AI, or has other pools.
        """
        try:
            spec = _Spec.model_validate_json(environ["CLUSTER_SPEC"])
        except ValidationError as error:
            raise ClusterError(
                f"CLUSTER_SPEC: {first_error(error)}. Unset it, or set TF_CONFIG."
            ) from None
        pools = [spec.cluster.get(f"workerpool{i}", []) for i in range(2)]
        workers, pool = tuple(pools[0] + pools[1]), spec.task.type.removeprefix("workerpool")
        if len(spec.cluster) > sum(map(bool, pools)) or pool not in ("0", "1"):
            raise ClusterError(
                f"CLUSTER_SPEC has the pools {', '.join(spec.cluster)}, of which tfdist uses "
                "workerpool0 and workerpool1. Remove the others, or set TF_CONFIG."
            )
        rank = spec.task.index + len(pools[0]) * int(pool)
        local = local_rank_and_size(workers, rank) if rank < len(workers) else (0, 1)
        return Cluster(self.name, rank, len(workers), *local, addresses=workers)


def first_error(error: ValidationError) -> str:
    """Formats the first error of a validation in one line."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "value"
    return f"{where}: {first['msg']}"
