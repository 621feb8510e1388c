"""Runs independent tasks in several processes with one progress bar.

Does not import TensorFlow.
"""

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

from pipelines.console.quiet import quieten_tensorflow
from pipelines.errors import DataError

Task = TypeVar("Task")
Result = TypeVar("Result")
#: A task calls this with the number of records it has processed since the last call.
Advance = Callable[[int], None]

_POLL_SECONDS = 0.1
#: State of a worker process: the function it calls and, in shared memory, the number of processed
#: records and a flag to stop. The pool's initializer sets it once per process, because the pickled
#: function can contain a whole data set.
_worker_state: dict[str, Any] = {}


class _CanceledError(Exception):
    """Ends a task whose result is no longer needed."""


def run(
    function: Callable[[Task, Advance], Result],
    tasks: Sequence[Task],
    *,
    num_workers: int,
    description: str,
    num_records: int | None,
) -> list[Result]:
    """Calls a function for each task and shows the number of processed records.

    Args:
        function: A picklable function, sent once to each process. It should call its second
            argument regularly, because an interrupt ends the task there.
        tasks: Picklable arguments, one per call.
        num_workers: Number of processes. One worker or one task runs in this process.
        description: Text beside the progress bar.
        num_records: Number of records in all tasks, or None if unknown.

    Returns:
        The results in the order of the tasks.

    Raises:
        DataError: A worker process died.
        Exception: The first exception that a task raised. The other tasks are canceled.
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
    """Yields the number of processed records regularly, the last time with the results."""
    # A fork of a process with TensorFlow's threads can hang.
    context = multiprocessing.get_context("spawn")
    done, stop = context.Value("q", 0), context.Value("b", 0)
    # Pickled here, because unpickling may import TensorFlow, which `_start` silences first.
    arguments = (done, stop, pickle.dumps(function))
    with futures.ProcessPoolExecutor(num_workers, context, _start, arguments) as pool:
        running = [pool.submit(_call, task) for task in tasks]
        try:
            waiting: set[Any] = set(running)
            while waiting:
                finished, waiting = futures.wait(waiting, _POLL_SECONDS)
                for future in finished:
                    future.result()
                yield done.value, []
            yield done.value, [future.result() for future in running]
        except BrokenProcessPool:
            raise DataError(
                "a worker process died, perhaps because memory ran out; try again with a smaller "
                "--num-workers"
            ) from None
        finally:
            stop.value = 1
            pool.shutdown(cancel_futures=True)


def _start(done: Any, stop: Any, pickled: bytes) -> None:
    # Ctrl-C reaches every process of the terminal, but only the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A parent that was killed cannot stop its workers.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    quieten_tensorflow()
    _worker_state.update(done=done, stop=stop, function=pickle.loads(pickled))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)


def _call(task: Any) -> Any:
    return _worker_state["function"](task, _advance)


def _advance(num_records: int) -> None:
    if _worker_state["stop"].value:
        raise _CanceledError
    with _worker_state["done"].get_lock():
        _worker_state["done"].value += num_records
