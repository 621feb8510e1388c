"""Connects to a Ray cluster, and reserves resources for workers in placement groups."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from pipelines.console import ray_tasks
from tfdist.errors import LaunchError, MissingError

_LOG = logging.getLogger("tfdist.launch")

#: Time to wait for the resources of more than the minimum number of workers.
_PLACEMENT_SECONDS = 10
#: Time after which a run that waits for resources prints a warning.
_WARNING_SECONDS = 5


class Resources(NamedTuple):
    """The resources of a worker, and how workers are spread over nodes.

    Attributes:
        cpus: CPU cores, as Ray counts them.
        gpus: GPUs, which Ray makes visible to the worker.
        strategy: Ray's placement strategy: `"PACK"`, `"SPREAD"`, `"STRICT_PACK"` or
            `"STRICT_SPREAD"`.
        seconds: Maximum time to wait for the resources.
    """

    cpus: int = 1
    gpus: int = 0
    strategy: str = "PACK"
    seconds: int = 300

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one worker as a bundle of a Ray placement group."""
        return {"CPU": float(self.cpus), **({"GPU": float(self.gpus)} if self.gpus else {})}

    def __str__(self) -> str:
        """Returns the resources of one worker as text, for messages."""
        return " and ".join(f"{number:g} {name}" for name, number in self.bundle.items())


def connect() -> None:
    """Connects to the cluster of `RAY_ADDRESS`, or to one on this host, or starts one.

    Raises:
        MissingError: Ray is not installed.
        LaunchError: The cluster cannot be reached.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingError("Ray is not installed: pip install 'ray[tune]'.") from error

    if ray.is_initialized():
        return
    # Hides the node's GPUs from workers that request none, as newer versions of Ray do by default.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    try:
        ray_tasks.check_reachable()
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"Cannot connect to the Ray cluster ({' '.join(str(error).split())[:300]}). Check "
            "RAY_ADDRESS, or start a cluster with ray start --head."
        ) from error


class Placement(NamedTuple):
    """Reserved resources for workers.

    Attributes:
        size: Number of workers.
        strategies: For each worker, the `scheduling_strategy` of its actor.
    """

    size: int
    strategies: list[Any]


@contextlib.contextmanager
def reserved(resources: Resources, min_workers: int, max_workers: int) -> Iterator[Placement]:
    """Reserves resources for as many workers as fit in the cluster, within the block.

    Inside a trial of Ray Tune whose resources include the workers' (`trial_resources`), the trial's
    own placement group is used.

    Raises:
        LaunchError: The cluster lacks resources for `min_workers` workers for `resources.seconds`.
    """
    import ray

    trial_group = ray.util.get_current_placement_group()
    if trial_group is not None and len(trial_group.bundle_specs) > max_workers:
        yield Placement(
            max_workers, [_in_bundle(trial_group, 1 + worker) for worker in range(max_workers)]
        )
        return
    size, group = _reserve(resources, min_workers, max_workers)
    try:
        yield Placement(size, [_in_bundle(group, worker) for worker in range(size)])
    finally:
        _release(group)


class Extension:
    """A pending request for the resources of one more worker, which Ray's autoscaler sees too."""

    def __init__(self, resources: Resources) -> None:
        self._group = _request(resources, 1)

    def is_granted(self) -> bool:
        """Returns whether the resources have been reserved."""
        return bool(self._group.wait(timeout_seconds=1))  # Ray accepts whole seconds only

    def withdraw(self) -> None:
        """Cancels the request, and frees the resources."""
        _release(self._group)


def _reserve(resources: Resources, min_workers: int, max_workers: int) -> tuple[int, Any]:
    """Returns the largest number of workers that can be placed, and their placement group."""
    size = max_workers
    while size > min_workers:
        group = _request(resources, size)
        if group.wait(timeout_seconds=_PLACEMENT_SECONDS):
            return size, group
        _release(group)
        size = max(min_workers, min(size - 1, _room(resources)))
    group = _request(resources, min_workers)
    if group.wait(timeout_seconds=min(_WARNING_SECONDS, resources.seconds)):
        return min_workers, group
    _LOG.warning("%s Waiting up to %d s.", _shortage(resources, min_workers), resources.seconds)
    if group.wait(timeout_seconds=max(0, resources.seconds - _WARNING_SECONDS)):
        return min_workers, group
    _release(group)
    raise LaunchError(
        f"{_shortage(resources, min_workers)} Start fewer or smaller workers, wait for other jobs "
        "to end, or add nodes."
    )


def _room(resources: Resources) -> int:
    """Returns an upper bound on the number of workers that fit: the free resources of all nodes."""
    import ray

    free = ray.available_resources()
    return min(int(free.get(name, 0.0) / need) for name, need in resources.bundle.items())


def _shortage(resources: Resources, size: int) -> str:
    import ray

    free = ray.available_resources()
    available = " and ".join(f"{free.get(name, 0.0):g} {name}" for name in resources.bundle)
    return (
        f"Cannot place {size} workers with {resources} each ({resources.strategy}): the Ray "
        f"cluster has {available} free on {sum(node['Alive'] for node in ray.nodes())} nodes."
    )


def _request(resources: Resources, size: int) -> Any:
    from ray.util.placement_group import placement_group

    return placement_group([resources.bundle] * size, strategy=resources.strategy)


def _release(group: Any) -> None:
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(group)


def _in_bundle(group: Any, index: int) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
