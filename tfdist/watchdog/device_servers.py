"""Ends a run whose device servers are lost, and names the one that was lost first."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import tensorflow as tf

from tfdist.errors import ClusterError
from tfdist.remote import connection, heartbeat
from tfdist.watchdog.deadline import EXIT_CODE, exit_now

#: Time for TensorFlow's own error to arrive, which ends a call in an orderly way.
_ERROR_SECONDS = 2.0
_TASK = re.compile(r"/job:device_server/replica:0/task:(\d+)")

_watch: _Watch | None = None


class _Watch:
    """What is known of the servers of this process, and whether a call uses them."""

    def __init__(self) -> None:
        self.calls = 0
        self.lost: heartbeat.Lost | None = None
        self._heartbeat = heartbeat.Heartbeat(connection.connected(), self._on_loss, EXIT_CODE)

    def _on_loss(self, lost: heartbeat.Lost) -> None:
        self.lost = lost
        time.sleep(_ERROR_SECONDS)
        if self.calls:
            exit_now(str(lost))


@contextmanager
def watched() -> Iterator[None]:
    """A context for calls that need the device servers, if this process is connected to some.

    Raises:
        ClusterError: A server is lost, and TensorFlow noticed. If it waits for the server instead,
            this process ends with the exit code of the watchdog.
    """
    global _watch
    if not connection.connected():
        yield
        return
    if _watch is None:
        _watch = _Watch()
    if _watch.lost:
        raise _error(_watch.lost)
    _watch.calls += 1
    try:
        yield
    except ClusterError:
        raise
    except Exception as error:
        found = _errors_of_tensorflow(error)
        if found and (lost := _explanation(found)):
            raise _error(lost) from error
        raise
    finally:
        _watch.calls -= 1


def _errors_of_tensorflow(error: BaseException | None) -> list[tf.errors.OpError]:
    """Returns those among an error and its causes."""
    found = []
    while error is not None:
        found += [error] if isinstance(error, tf.errors.OpError) else []
        error = error.__cause__ or error.__context__
    return found


def _explanation(errors: Sequence[tf.errors.OpError]) -> heartbeat.Lost | None:
    """Returns the server whose loss explains errors, if it does."""
    servers = connection.connected()
    if lost := (_watch and _watch.lost) or heartbeat.first_lost(servers):
        return lost
    for one in errors:  # of a server that was started again
        named = _TASK.search(str(one))
        if isinstance(one, (tf.errors.UnavailableError, tf.errors.AbortedError)):
            server = servers[int(named[1])] if named else ", ".join(servers)
            return heartbeat.Lost(server, f"was lost ({str(one).splitlines()[0]})")
    return None


def _error(lost: heartbeat.Lost) -> ClusterError:
    error = ClusterError(str(lost))
    error.exit_code = EXIT_CODE
    return error
