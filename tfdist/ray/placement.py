"""Where in the Ray cluster workers run: connecting to it, and placement groups of actors."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from tfdist.errors import LaunchError, MissingError

_LOG = logging.getLogger("tfdist.launch")

#: Time for more workers than the fewest to be placed.
_MORE_SECONDS = 10
#: Time after which a run that waits for resources says so.
_PATIENCE_SECONDS = 5


class Resources(NamedTuple):
    """What a worker needs, and how workers are spread over nodes.

    Attributes:
        cpus: CPU cores, as Ray counts them.
        gpus: GPUs, which Ray makes visible to the worker.
        strategy: Ray's placement strategy: `"PACK"`, `"SPREAD"`, `"STRICT_PACK"` or
            `"STRICT_SPREAD"`.
        seconds: Longest time to wait for them.
    """

    cpus: int = 1
    gpus: int = 0
    strategy: str = "PACK"
    seconds: int = 300

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one worker in Ray's words."""
        return {"CPU": float(self.cpus), **({"GPU": float(self.gpus)} if self.gpus else {})}

    def __str__(self) -> str:
        """Returns the resources of one worker for messages."""
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
        raise MissingError("Ray is not installed: pip install 'tfdist[ray]'.") from error

    if ray.is_initialized():
        return
    # A worker without GPUs sees those of its node otherwise; Ray announces this as its default.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"The Ray cluster cannot be reached ({' '.join(str(error).split())[:300]}): check "
            "RAY_ADDRESS, or start a cluster with ray start --head."
        ) from error


class Placement(NamedTuple):
    """Room for workers in the cluster.

    Attributes:
        size: Number of workers.
        strategies: For each worker, the `scheduling_strategy` of its actor.
    """

    size: int
    strategies: list[Any]


@contextlib.contextmanager
def placed(resources: Resources, fewest: int, most: int) -> Iterator[Placement]:
    """Reserves resources for as many workers as the cluster has room for, within the block.

    Inside a trial of Ray Tune whose resources include the workers' (`trial_resources`), the trial's
    own placement group is used.

    Args:
        resources: Resources of each worker.
        fewest: Workers without which nothing is started.
        most: Workers that are enough.

    Raises:
        LaunchError: The cluster has no room for `fewest` workers within `resources.seconds`.
    """
    import ray

    ours = ray.util.get_current_placement_group()
    if ours is not None and len(ours.bundle_specs) > most:
        yield Placement(most, [_in_bundle(ours, 1 + worker) for worker in range(most)])
        return
    size, group = _reserve(resources, fewest, most)
    try:
        yield Placement(size, [_in_bundle(group, worker) for worker in range(size)])
    finally:
        _release(group)


class Extension:
    """A standing request for one more worker's resources, which an autoscaler sees as well.

    Args:
        resources: Resources of the worker.
    """

    def __init__(self, resources: Resources) -> None:
        self._group = _request(resources, 1)

    def is_granted(self) -> bool:
        """Tells whether the cluster has room for the worker now."""
        return bool(self._group.wait(timeout_seconds=1))  # Ray takes whole seconds

    def withdraw(self) -> None:
        """Ends the request, and frees the resources."""
        _release(self._group)


def _reserve(resources: Resources, fewest: int, most: int) -> tuple[int, Any]:
    """Returns the largest number of workers that can be placed, and their placement group."""
    size = most
    while size > fewest:
        group = _request(resources, size)
        if group.wait(timeout_seconds=_MORE_SECONDS):
            return size, group
        _release(group)
        size = max(fewest, min(size - 1, _room(resources)))
    group = _request(resources, fewest)
    if group.wait(timeout_seconds=min(_PATIENCE_SECONDS, resources.seconds)):
        return fewest, group
    _LOG.warning("%s Waiting up to %d s.", _shortage(resources, fewest), resources.seconds)
    if group.wait(timeout_seconds=max(0, resources.seconds - _PATIENCE_SECONDS)):
        return fewest, group
    _release(group)
    raise LaunchError(
        f"{_shortage(resources, fewest)} Start fewer or smaller workers, wait for other jobs to "
        "end, or add nodes."
    )


def _room(resources: Resources) -> int:
    """Returns how many workers the free resources of all nodes together suffice for."""
    import ray

    free = ray.available_resources()
    return min(int(free.get(name, 0.0) / need) for name, need in resources.bundle.items())


def _shortage(resources: Resources, size: int) -> str:
    import ray

    free = ray.available_resources()
    has = " and ".join(f"{free.get(name, 0.0):g} {name}" for name in resources.bundle)
    return (
        f"{size} workers with {resources} each cannot be placed ({resources.strategy}): the Ray "
        f"cluster has {has} free on {sum(node['Alive'] for node in ray.nodes())} nodes."
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
