"""`tfdist.ray.train`: runs a function of a notebook or of a trial on workers of a Ray cluster."""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import cloudpickle

from tfdist.errors import ConfigurationError, LaunchError
from tfdist.launcher.notebook import pickled_call
from tfdist.launcher.processes import Streams
from tfdist.launcher.restarts import Failure, Restarts, run_with_restarts
from tfdist.ray.blocks import execute
from tfdist.ray.messages import Message, Report, Result
from tfdist.ray.placement import Resources, connect
from tfdist.ray.reports import unpack

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
    """Calls a function on several new workers in a Ray cluster, and shows what rank 0 prints.

    Connects to the cluster of `RAY_ADDRESS`, or to one on this host, or starts one, unless this
    process is connected already. Each worker is a process of its own on its node. Within a trial of
    Ray Tune, what the function reports (`tfdist.ray.report`, `tfdist.ray.ReportCallback`) is
    reported to Tune.

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
        fn: Creates its model and its `tfdist.Trainer`, with a strategy of several processes. It may
            be defined in a cell; tfdist has to be installed on the nodes.
        num_workers: Number of workers, at most.
        args: Positional arguments of the function, the same in each worker.
        kwargs: Keyword arguments of the function.
        datasets: Datasets of Ray Data by name. They are executed before the workers start, and the
            function reads them by `tfdist.ray.dataset`.
        cpus_per_worker: CPU cores that Ray reserves for each worker.
        gpus_per_worker: GPUs that each worker sees.
        placement: Ray's placement strategy: `"PACK"`, `"SPREAD"`, `"STRICT_PACK"` or
            `"STRICT_SPREAD"`.
        placement_timeout: Seconds to wait for these resources.
        max_restarts: Number of failures that are followed by a restart of all workers. The function
            resumes where its `Trainer(checkpoints=...)` says.
        min_workers: Start with fewer workers, down to this number, where the cluster has no room
            for more; None: `num_workers`. More are added when there is room, by a restart, so it
            needs `max_restarts`.

    Returns:
        What the function returned on rank 0; it must be picklable.

    Raises:
        MissingError: Ray is not installed.
        LaunchError: The workers cannot be placed, one failed (the message has its traceback), or
            the function refers to something that cannot be pickled.
        KeyboardInterrupt: The kernel was interrupted; the workers have ended.
    """
    fewest = num_workers if min_workers is None else min_workers
    _check(num_workers, fewest, max_restarts)
    function = cloudpickle.dumps((sys.path, pickled_call(functools.partial(fn, *args, **kwargs))))
    connect()
    from tfdist.ray.workers import Job, run

    results: list[bytes] = []
    job = Job(
        ("python", "-m", "tfdist.ray.worker"),
        Resources(cpus_per_worker, gpus_per_worker, placement, placement_timeout),
        fewest,
        num_workers,
        function=function,
        datasets=execute(datasets),
        on_message=functools.partial(_take, results),
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

    Without it, trials could take all cores, and their workers would wait for ever.

    Example:
        >>> tfdist.ray.trial_resources(2).required_resources["CPU"]
        2.01

    Args:
        num_workers: As for `train`, like the other arguments.
        cpus_per_worker: CPU cores of each worker.
        gpus_per_worker: GPUs of each worker.
        placement: Ray's placement strategy.
    """
    from ray.tune import PlacementGroupFactory

    worker = Resources(cpus_per_worker, gpus_per_worker).bundle
    # The trial itself only waits.
    return PlacementGroupFactory([{"CPU": 0.01}, *[worker] * num_workers], strategy=placement)


def _check(num_workers: int, fewest: int, max_restarts: int) -> None:
    if not 1 <= fewest <= num_workers:
        raise ConfigurationError(
            f"num_workers={num_workers}, min_workers={fewest}: expected at least 1 worker, and "
            "min_workers of at most num_workers."
        )
    if fewest < num_workers and not max_restarts:
        raise ConfigurationError(
            f"min_workers={fewest} needs max_restarts: workers are added and lost by a restart."
        )


def _take(results: list[bytes], message: Message) -> None:
    """Keeps a result, and passes a report on to the trial of Ray Tune that this process is."""
    if isinstance(message, Result):
        results.append(message.pickled)
    if not isinstance(message, Report) or not _is_trial():
        return
    from ray import tune

    if not message.checkpoint:
        tune.report(message.metrics)
        return
    with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
        unpack(message.checkpoint, folder)
        tune.report(message.metrics, checkpoint=tune.Checkpoint.from_directory(folder))


def _is_trial() -> bool:
    """Tells whether this process runs a trial of Ray Tune."""
    # Nobody else loads it: a trial's process has.
    if "ray.tune" not in sys.modules:
        return False
    from ray import tune

    return tune.get_context().get_trial_id() is not None
