"""Many independent tasks over several processes, with one progress bar. Imports no TensorFlow."""

from __future__ import annotations

import concurrent.futures as futures
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pipelines.errors import DataError
from pipelines.quiet import quieten_tensorflow

Task = TypeVar("Task")
Result = TypeVar("Result")
#: Told by a task how many more records it has done.
Advance = Callable[[int], None]

_SECONDS_BETWEEN_LOOKS = 0.1
#: Of a worker process: the function that it calls, and two numbers in memory that all processes
#: see: the records done so far, and whether to stop. The pool's initializer sets it, for none can
#: come with a task: a function may carry a whole data set with it.
_of_worker: dict[str, Any] = {}


class _StopAskedError(Exception):
    """Ends a task of which nobody wants the result any more."""


def default_num_workers() -> int:
    """Processes that can run at the same time here."""
    return len(os.sched_getaffinity(0))


def run(
    function: Callable[[Task, Advance], Result],
    tasks: Sequence[Task],
    *,
    num_workers: int,
    description: str,
    num_records: int | None,
) -> list[Result]:
    """Calls a function for each task and shows how many records are done.

    Args:
        function: picklable; sent once to each process, where all its tasks use what it carries. It
            calls its second argument now and then, which is also where an interrupt ends it.
        tasks: picklable.
        num_workers: processes; with one, or one task, all is done in this process.
        description: stands beside the bar.
        num_records: of all tasks, or None if nobody knows yet.

    Returns:
        The results in the order of the tasks.

    Raises:
        DataError: a worker process died.
        Exception: the first that a task raised; the others are ended.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        bar = progress.add_task(description, total=num_records)
        if num_workers == 1 or len(tasks) <= 1:
            return [function(task, lambda n: progress.advance(bar, n)) for task in tasks]
        results = []
        for done, finished in _in_processes(function, tasks, min(num_workers, len(tasks))):
            progress.update(bar, completed=done)
            results = finished
        return results


def _in_processes(
    function: Callable[[Task, Advance], Result], tasks: Sequence[Task], num_workers: int
) -> Iterator[tuple[int, list[Result]]]:
    """Yields now and then how many records are done, and at the end the results as well."""
    # Not forked: a fork of a process with TensorFlow's threads can hang.
    context = multiprocessing.get_context("spawn")
    done, stop = context.Value("q", 0), context.Value("b", 0)
    # Pickled here: what it refers to may import TensorFlow, which `_start` keeps silent first.
    arguments = (done, stop, pickle.dumps(function))
    with futures.ProcessPoolExecutor(num_workers, context, _start, arguments) as pool:
        running = [pool.submit(_call, task) for task in tasks]
        try:
            waiting: set[Any] = set(running)
            while waiting:
                finished, waiting = futures.wait(waiting, _SECONDS_BETWEEN_LOOKS)
                for future in finished:
                    future.result()
                yield done.value, []
            yield done.value, [future.result() for future in running]
        except BrokenProcessPool:
            raise DataError(
                "a worker process died, perhaps for lack of memory; start again with fewer "
                "--num-workers"
            ) from None
        finally:
            stop.value = 1
            pool.shutdown(cancel_futures=True)


def _start(done: Any, stop: Any, pickled: bytes) -> None:
    """Prepares a worker process."""
    # Ctrl-C reaches every process of the terminal; the first process is who decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A killed first process asks nobody to stop.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    quieten_tensorflow()
    _of_worker.update(done=done, stop=stop, function=pickle.loads(pickled))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)


def _call(task: Any) -> Any:
    return _of_worker["function"](task, _advance)


def _advance(num_records: int) -> None:
    if _of_worker["stop"].value:
        raise _StopAskedError
    with _of_worker["done"].get_lock():
        _of_worker["done"].value += num_records
