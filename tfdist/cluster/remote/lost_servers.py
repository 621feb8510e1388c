"""Ends a run whose device servers are lost, and names the one that was lost first."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import tensorflow as tf

from tfdist.cluster.deadline import exit_now
from tfdist.cluster.remote import connection
from tfdist.cluster.remote.heartbeat import Lost, first_lost
from tfdist.errors import ClusterError, first_line

#: Time for TensorFlow's own error to arrive, which ends a call in an orderly way.
_ERROR_SECONDS = 2.0
_TASK = re.compile(r"/job:device_server/replica:0/task:(\d+)")

#: Number of calls in progress that need the servers.
_calls = 0


@contextmanager
def watched() -> Iterator[None]:
    """A context for calls that need the device servers, if this process is connected to some.

    Raises:
        ClusterError: A server is lost, and TensorFlow noticed. If it waits for the server instead,
            this process ends with the exit code of the watchdog.
    """
    global _calls
    heartbeat = connection.heartbeat()
    if heartbeat is None:
        yield
        return
    heartbeat.on_loss = _end_calls
    if heartbeat.lost:
        raise connection.error_of(heartbeat.lost)
    _calls += 1
    try:
        yield
    except ClusterError:
        raise
    except Exception as error:
        errors = _errors_of_tensorflow(error)
        if errors and (lost := heartbeat.lost or _explanation(errors)):
            raise connection.error_of(lost) from error
        raise
    finally:
        _calls -= 1


def _end_calls(lost: Lost) -> None:
    """Ends this process if a call still waits for a lost server."""
    time.sleep(_ERROR_SECONDS)
    if _calls:
        exit_now(str(lost))


def _errors_of_tensorflow(error: BaseException | None) -> list[tf.errors.OpError]:
    """Returns those among an error and its causes."""
    errors = []
    while error is not None:
        errors += [error] if isinstance(error, tf.errors.OpError) else []
        error = error.__cause__ or error.__context__
    return errors


def _explanation(errors: Sequence[tf.errors.OpError]) -> Lost | None:
    """Returns the server whose loss explains errors, if it does."""
    servers = connection.connected()
    if lost := first_lost(servers):
        return lost
    for one in errors:  # of a server that was started again
        named = _TASK.search(str(one))
        if isinstance(one, (tf.errors.UnavailableError, tf.errors.AbortedError)):
            server = servers[int(named[1])] if named else ", ".join(servers)
            return Lost(server, f"was lost ({first_line(one)})")
    return None
