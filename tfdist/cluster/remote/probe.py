"""Asks device servers whether they are alive, and is the program of the process that does so.

A gRPC server greets every connection with HTTP/2 settings (RFC 9113, section 3.4), which a stopped
process does not do. So this needs no second port. It imports next to nothing, because servers are
watched from the moment that this process has started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

#: Time between two questions, and in which an answer has to come.
_INTERVAL_SECONDS, _ANSWER_SECONDS = 0.5, 5.0
#: Time without any answer after which a server counts as lost, while its host still accepts
#: connections or does not respond at all.
SILENCE_SECONDS = 20.0
#: Time for the training process to acknowledge that a server is lost. With the time to find out and
#: the time that a call has to fail by itself, it stays below the 5 s that the documentation states.
_ACKNOWLEDGE_SECONDS = 2.0
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # and empty settings
_SIGEV_THREAD = 2  # of glibc's and musl's <signal.h>


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


def answers(server: str, seconds: float = _ANSWER_SECONDS) -> bool:
    """Tells whether a server answers.

    Raises:
        ConnectionError: Nothing listens at its address.
    """
    try:
        host, _, port = server.rpartition(":")
        endpoint = host.removeprefix("[").removesuffix("]"), int(port)
        with socket.create_connection(endpoint, seconds) as connection:
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
    acknowledged = threading.Event()

    def read() -> None:
        for _ in sys.stdin:
            acknowledged.set()
        os._exit(0)  # with the parent

    threading.Thread(target=read, daemon=True).start()
    is_known.wait()
    print(lost[0].server, lost[0].reason, sep="\t", flush=True)
    if not acknowledged.wait(_ACKNOWLEDGE_SECONDS):
        print(f"error: {lost[0]}\nProcess {parent} waits for it and is ended.", file=sys.stderr)
        if queue:
            # Ends the parent, whose queue's descriptor this process inherited.
            ctypes.CDLL(None).mq_send(queue, b"exit", ctypes.c_size_t(4), 0)
            time.sleep(_ACKNOWLEDGE_SECONDS)  # this process ends with the parent
        os.kill(parent, signal.SIGKILL)


class _SigEvent(ctypes.Structure):
    """`struct sigevent`, which is 64 bytes long."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_char * 32),
    )


def native_exit(code: int) -> int | None:
    """Returns the file descriptor of a queue: a message to it ends this process with the code.

    Signals cannot while a call blocks all of Python: it handles them after the call, and a killed
    process has no exit code. A message queue can start a thread of the C library (mq_notify(3))
    that calls `_exit`. Returns None where the system has no message queues.
    """
    name = f"/tfdist-{os.getpid()}".encode()
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NONBLOCK
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        queue: int = libc.mq_open(name, flags, ctypes.c_uint(0o600), None)
        libc.mq_unlink(name)
        function = ctypes.cast(libc._exit, ctypes.c_void_p)
        event = _SigEvent(value=code, notify=_SIGEV_THREAD, function=function)
        failed = queue < 0 or libc.mq_notify(queue, ctypes.byref(event))
    except AttributeError:  # a C library without them
        return None
    return None if failed else queue


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
