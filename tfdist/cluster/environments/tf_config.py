"""TF_CONFIG: the whole cluster and this task as JSON, set by hand, by launchers and by TFJob."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from tfdist.cluster.record import Cluster, Environ, check_distinct, local_place
from tfdist.errors import ClusterError


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


def read(environ: Environ) -> Cluster | None:
    """Returns the cluster that TF_CONFIG describes; an empty one counts as not set.

    Raises:
        ClusterError: It is not what TensorFlow's guide on multi-worker training lays down, or
            contradicts itself.
    """
    text = environ.get("TF_CONFIG", "").strip()
    if not text.strip("{} "):
        return None
    try:
        config = _Config.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "its text"
        raise ClusterError(
            f"TF_CONFIG: {place}: {first['msg']}; expected "
            '{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}.'
        ) from None
    return _cluster(config.cluster, config.task)


def _cluster(tasks: _Tasks, task: _Task) -> Cluster:
    """The cluster of checked parts that may still contradict each other."""
    workers = (*tasks.chief, *tasks.worker)
    if not workers:
        raise ClusterError('TF_CONFIG names no task "worker" and no "chief": it needs one.')
    check_distinct("TF_CONFIG", (*workers, *tasks.ps, *tasks.evaluator))
    named = len(getattr(tasks, task.type))
    # TensorFlow's own configurations leave the evaluator out of the cluster: nobody calls it.
    if task.index >= named and not (task.type == "evaluator" and not named and not task.index):
        raise ClusterError(
            f"TF_CONFIG: task {task.type} {task.index}, but the cluster names {named} of that "
            f"type: indices go from 0 to {named - 1}."
            if named
            else f"TF_CONFIG: task {task.type} {task.index}, but the cluster names none."
        )
    first = {
        "chief": 0,
        "worker": len(tasks.chief),
        "ps": len(workers),
        "evaluator": len(workers) + len(tasks.ps),
    }
    rank = first[task.type] + task.index
    place = local_place(workers, rank) if rank < len(workers) else (0, 1)
    return Cluster(
        "TF_CONFIG",
        rank,
        len(workers),
        *place,
        addresses=workers,
        task=task.type,
        ps=tuple(tasks.ps),
        has_chief=bool(tasks.chief),
    )
