"""Runs the processes of one host as a group: one fails and all end, and none is left."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

from tfdist.launcher.child import Child, Failure, Streams
from tfdist.launcher.children import Children
from tfdist.launcher.orphans import marked, watching
from tfdist.launcher.plan import Process
from tfdist.launcher.restarts import NONE, Restarts
from tfdist.launcher.signals import signals_raise


def run(
    processes: Sequence[Process],
    *,
    grace: float,
    restarts: Restarts = NONE,
    streams: Streams | None = None,
    seconds: float | None = None,
) -> Failure | None:
    """Runs processes until all have ended, or one fails and the others are ended.

    Args:
        processes: All on this host.
        grace: Seconds that they have to end by themselves after an interrupt or a preemption, or
            after the one that leads has ended.
        restarts: Allow those that may return to be started again.
        streams: Where their output goes.
        seconds: After which they are preempted; None: never.

    Returns:
        The first failure, or None.

    Raises:
        KeyboardInterrupt: SIGINT came; they have been ended.
        SystemExit: SIGTERM, SIGUSR1 or SIGHUP came; they have been ended. Its code is `REQUEUE`
            where they have saved what they had.
        LaunchError: A program cannot be started.
    """
    running = started(processes, grace=grace, restarts=restarts, streams=streams)
    with signals_raise(), running as group:
        failed = group.wait(seconds)
        if not failed and seconds is not None and not group.done:
            return group.preempt()
    return failed.failure()._replace(ended=tuple(group.well)) if failed else None


@contextmanager
def started(
    processes: Sequence[Process],
    *,
    grace: float,
    restarts: Restarts = NONE,
    streams: Streams | None = None,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Children]:
    """Starts processes; leaving the block ends those that still run, and all that they started.

    Args:
        processes: As for `run`, like those that follow.
        grace: Seconds.
        restarts: Of those that may return.
        streams: Where output goes.
        environ: Variables that all have, beside this process's and their own.

    Raises:
        LaunchError: A program cannot be started.
    """
    mark = uuid.uuid4().hex
    shared = {**environ, **marked(mark)}
    children = [Child(process, shared, streams or Streams()) for process in processes]
    try:
        with watching(mark), Children(children, grace, restarts) as group:
            group.start()
            yield group
    finally:  # now that nobody holds a pipe open any more
        for child in children:
            child.drain()
