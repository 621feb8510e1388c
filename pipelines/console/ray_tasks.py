"""Runs independent tasks in a Ray cluster, as `parallel_tasks` does on this machine.

The address is checked before, because Ray itself tries to connect for minutes.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipelines.console.parallel_tasks import Advance, Result, Task
from pipelines.errors import DataError

#: A task is repeated this often if its machine dies.
_NUM_RETRIES = 3
#: Where `ray start` writes the address of its cluster, for processes without `RAY_ADDRESS`.
_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
_SECONDS = 10.0


def check_reachable() -> None:
    """Checks that something listens where `ray.init()` connects to, if that is `HOST:PORT`.

    Raises:
        ConnectionError: Nothing answers there.
    """
    address, advice = os.environ.get("RAY_ADDRESS", ""), ""
    if address in ("", "auto"):
        with contextlib.suppress(OSError):
            address = _CURRENT_CLUSTER.read_text().strip()
            advice = f", which {_CURRENT_CLUSTER} names; RAY_ADDRESS=local starts a new cluster"
    host_and_port = re.fullmatch(r"(?:ray://)?\[?([^/]+?)\]?:(\d+)", address)
    if host_and_port is None:
        return
    try:
        socket.create_connection((host_and_port[1], int(host_and_port[2])), _SECONDS).close()
    except (OSError, OverflowError) as error:  # OverflowError: no such port
        raise ConnectionError(f"no answer from {address} ({error}){advice}") from None


def run(function: Callable[[Task, Advance], Result], tasks: Sequence[Task]) -> list[Result]:
    """Calls a function for each task, on as many cores as the cluster has.

    Args:
        function: A picklable function, sent once to each machine.
        tasks: Picklable arguments, one per call.

    Returns:
        The results in the order of the tasks.

    Raises:
        DataError: Ray is not installed, or its cluster failed.
        Exception: The first exception that a task raised. The other tasks run on until they end, or
            until Ray disconnects, which the end of this process also does.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise DataError("--via ray requires Ray: pip install 'ray[tune]'") from None
    try:
        if not ray.is_initialized():
            check_reachable()
            # Uses the cluster of RAY_ADDRESS or of this machine, and otherwise starts one.
            ray.init(log_to_driver=False)
    except (OSError, ValueError, RuntimeError) as error:
        address = os.environ.get("RAY_ADDRESS", "")
        raise DataError(
            f"--via ray: no connection to a cluster (RAY_ADDRESS={address!r}): "
            f"{str(error).partition('. ')[0]}"
        ) from None

    @ray.remote(max_retries=_NUM_RETRIES)
    def call(function: Callable[[Task, Advance], Result], task: Task) -> Result:
        return function(task, lambda num_records: None)

    shared = ray.put(function)
    # Nothing cancels them after an error: if a task that Ray cancels ends at the same moment, Ray
    # aborts this process (https://github.com/ray-project/ray/pull/54785).
    running = [call.remote(shared, task) for task in tasks]
    try:
        results: list[Result] = ray.get(running)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, FileNotFoundError):
            raise DataError(
                f"--via ray: {error.cause.filename}: no such file on a machine of the cluster; all "
                "of them need to reach SRC and DEST"
            ) from None
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise DataError(f"--via ray: {str(error).partition('.')[0]}; run it again") from None
    return results
