"""`tfdist.ray.train`: runs a Python function on the workers of a Ray cluster."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import cloudpickle

from tfdist.cluster.launcher.notebook import pickled_call
from tfdist.cluster.launcher.processes import Streams
from tfdist.cluster.launcher.restarts import Failure, Restarts, run_with_restarts
from tfdist.console import folders
from tfdist.errors import ConfigurationError, LaunchError
from tfdist.ray.placement import Resources, connect
from tfdist.ray.reports import Message, Report, Result, execute, unpack

if TYPE_CHECKING:
    from ray.data import Dataset
    from ray.tune import PlacementGroupFactory


def train(
    fn: Callable[..., Any],
    num_workers: int = 2,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    datasets: Mapping[str, Dataset] = MappingProxyType({}),
    cpus_per_worker: int = 1,
    gpus_per_worker: int = 0,
    placement: str = "PACK",
    placement_timeout: int = 300,
    max_restarts: int = 0,
    min_workers: int | None = None,
) -> Any:
    """Runs a function on several new workers in a Ray cluster, and prints the output of rank 0.

    Unless this process is connected to Ray already, it connects to the cluster of `RAY_ADDRESS` or
    to one on this host, or starts one. Each worker is a separate process on its node. Within a
    trial of Ray Tune, metrics that the function reports (`tfdist.ray.report`,
    `tfdist.ray.ReportCallback`) are passed to Tune.

    Example:
        >>> def fn(rate):
        ...     import tfdist
        ...     from my_package import build_model, x, y
        ...
        ...     trainer = tfdist.Trainer(build_model, strategy="multi_worker")
        ...     trainer.model.optimizer.learning_rate = rate
        ...     trainer.fit(x, y, batch_size=64, verbose=0)
        ...     return tfdist.size()
        >>> tfdist.ray.train(fn, num_workers=2, args=(0.1,))
        2

    Args:
        fn: The function, which creates a model and a `tfdist.Trainer` with a multi-process
            strategy. It may be defined in a notebook cell. tfdist must be installed on the nodes.
        num_workers: Maximum number of workers.
        args: Positional arguments of the function, the same in each worker.
        kwargs: Keyword arguments of the function.
        datasets: Datasets of Ray Data by name. They are executed before the workers start, and the
            function reads them with `tfdist.ray.dataset`.
        cpus_per_worker: CPU cores that Ray reserves for each worker.
        gpus_per_worker: GPUs that each worker sees.
        placement: Ray's placement strategy: `"PACK"`, `"SPREAD"`, `"STRICT_PACK"` or
            `"STRICT_SPREAD"`.
        placement_timeout: Seconds to wait until the cluster has these resources.
        max_restarts: How often all workers are restarted after a failure. The function resumes from
            a checkpoint if its trainer has `checkpoints=...`.
        min_workers: Minimum number of workers to start with if the cluster has no resources for
            `num_workers`; None: `num_workers`. When resources become free, workers are added by a
            restart, so this needs `max_restarts`.

    Returns:
        The return value of the function on rank 0, which must be picklable.

    Raises:
        MissingError: Ray is not installed.
        LaunchError: The workers cannot be placed, one failed (the message has its traceback), or
            the function refers to something that cannot be pickled.
        KeyboardInterrupt: The process was interrupted. All workers have ended.
    """
    min_workers = num_workers if min_workers is None else min_workers
    _check(num_workers, min_workers, max_restarts)
    function = cloudpickle.dumps((sys.path, pickled_call(functools.partial(fn, *args, **kwargs))))
    connect()
    from tfdist.ray.workers import Job, run

    results: list[bytes] = []
    job = Job(
        ("python", "-m", "tfdist.ray.worker"),
        Resources(cpus_per_worker, gpus_per_worker, placement, placement_timeout),
        min_workers,
        num_workers,
        function=function,
        datasets=execute(datasets),
        on_message=functools.partial(_handle, results),
        streams=Streams(only="0"),
    )
    failure: Failure | None = run_with_restarts(lambda: run(job), Restarts(max_restarts))
    if failure:
        raise LaunchError(str(failure))
    return cloudpickle.loads(results[-1])


def trial_resources(
    num_workers: int, *, cpus_per_worker: int = 1, gpus_per_worker: int = 0, placement: str = "PACK"
) -> PlacementGroupFactory:
    """Returns the resources of a trial of Ray Tune that calls `train`, for `tune.with_resources`.

    Without it, trials can reserve all cores, and their workers then wait for resources forever.

    Example:
        >>> tfdist.ray.trial_resources(2).required_resources["CPU"]
        2.01

    Args:
        num_workers: Number of workers of each trial.
        cpus_per_worker: CPU cores of each worker.
        gpus_per_worker: GPUs of each worker.
        placement: Ray's placement strategy.
    """
    from ray.tune import PlacementGroupFactory

    worker = Resources(cpus_per_worker, gpus_per_worker).bundle
    # The trial's own process only waits for its workers.
    return PlacementGroupFactory([{"CPU": 0.01}, *[worker] * num_workers], strategy=placement)


def _check(num_workers: int, min_workers: int, max_restarts: int) -> None:
    if not 1 <= min_workers <= num_workers:
        raise ConfigurationError(
            f"num_workers={num_workers}, min_workers={min_workers}: expected at least 1 worker, "
            "and min_workers of at most num_workers."
        )
    if min_workers < num_workers and not max_restarts:
        raise ConfigurationError(
            f"min_workers={min_workers} needs max_restarts: workers are added and removed by a "
            "restart."
        )


def _handle(results: list[bytes], message: Message) -> None:
    """Stores a result. Passes a report to Ray Tune if this process runs a trial."""
    if isinstance(message, Result):
        results.append(message.pickled)
    if not isinstance(message, Report) or not _is_trial():
        return
    from ray import tune

    if not message.checkpoint:
        tune.report(message.metrics)
        return
    with folders.temporary() as folder:
        unpack(message.checkpoint, folder)
        tune.report(message.metrics, checkpoint=tune.Checkpoint.from_directory(folder))


def _is_trial() -> bool:
    # The process of a trial has imported ray.tune already. Other processes need not import it.
    if "ray.tune" not in sys.modules:
        return False
    from ray import tune

    return tune.get_context().get_trial_id() is not None
