"""Asks device servers whether they are alive, and is the program of the process that does so.

A gRPC server greets every connection with HTTP/2 settings (RFC 9113, section 3.4), which a stopped
process does not do. So this needs no second port. It imports next to nothing, because servers are
watched from the moment that this process has started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, NamedTuple

from tfdist.cluster.remote import native_exit

#: Time between two questions, and in which an answer has to come.
_INTERVAL_SECONDS, _ANSWER_SECONDS = 0.5, 5.0
#: Time without any answer after which a server counts as lost, while its host still accepts
#: connections or does not respond at all.
SILENCE_SECONDS = 20.0
#: Time for the training process to acknowledge that a server is lost. With the time to find out and
#: the time that a call has to fail by itself, it stays below the 5 s that the documentation states.
_ACKNOWLEDGE_SECONDS = 2.0
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # and empty settings


class Lost(NamedTuple):
    """A server that is lost.

    Attributes:
        server: Its address.
        reason: What happened, for messages.
    """

    server: str
    reason: str

    def __str__(self) -> str:
        return (
            f"Device server {self.server} {self.reason}. The variables on it are lost: start it "
            "again, and run the same command to resume from the last checkpoint. If a second "
            "training uses it, start another server for that one: TensorFlow's server would crash."
        )


def answers(server: str) -> bool:
    """Tells whether a server answers.

    Raises:
        ConnectionError: Nothing listens at its address.
    """
    try:
        host, _, port = server.rpartition(":")
        endpoint = host.removeprefix("[").removesuffix("]"), int(port)
        with socket.create_connection(endpoint, _ANSWER_SECONDS) as connection:
            connection.sendall(_GREETING)
            if not connection.recv(1):
                raise ConnectionResetError(f"{server} closed the connection")
            return True
    except ConnectionError:
        raise
    except OSError:  # too late, or no route
        return False


def problem(server: str) -> str:
    """Returns why a server cannot be used; empty if it answers."""
    try:
        return "" if answers(server) else f"has not answered for {_ANSWER_SECONDS:.0f} s"
    except ConnectionError as error:
        return f"is gone ({error.strerror or error})"


def _ask_for_ever(server: str, on_loss: Callable[[Lost], None]) -> None:
    """Asks one server until it is lost."""
    heard = time.monotonic()
    while True:
        with contextlib.suppress(ConnectionError):
            if answers(server):
                heard = time.monotonic()
            elif time.monotonic() > heard + SILENCE_SECONDS - _ANSWER_SECONDS:
                on_loss(Lost(server, f"has not answered for {time.monotonic() - heard:.0f} s"))
                return
            time.sleep(_INTERVAL_SECONDS)
            continue
        time.sleep(_INTERVAL_SECONDS / 4)  # not a server that is too busy for one connection
        with contextlib.suppress(ConnectionError):
            answers(server)
            continue
        on_loss(Lost(server, "is gone (nothing listens at its address)"))
        return


def main(parent: int, queue: int, servers: Sequence[str]) -> None:
    """Asks servers, prints the first that is lost, and ends the parent if it cannot react."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lost, is_known = list[Lost](), threading.Event()

    def on_loss(one: Lost) -> None:
        lost.append(one)
        is_known.set()

    for server in servers:
        threading.Thread(target=_ask_for_ever, args=(server, on_loss), daemon=True).start()
    acknowledged = _read_until_end(sys.stdin)
    is_known.wait()
    print(lost[0].server, lost[0].reason, sep="\t", flush=True)
    if not acknowledged.wait(_ACKNOWLEDGE_SECONDS):
        print(f"error: {lost[0]}\nProcess {parent} waits for it and is ended.", file=sys.stderr)
        if queue:
            native_exit.trigger(queue)
            time.sleep(_ACKNOWLEDGE_SECONDS)  # this process ends with the parent
        os.kill(parent, signal.SIGKILL)


def _read_until_end(pipe: IO[str]) -> threading.Event:
    """Ends this process with the parent; sets the event when the parent writes a line."""
    event = threading.Event()

    def read() -> None:
        for _ in pipe:
            event.set()
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return event


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
