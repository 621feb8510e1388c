"""Ends a process with an exit code, by another process, while a call blocks all of its Python.

Signals cannot: Python handles them after the call, and a killed process has no exit code. A message
queue can start a thread of the C library (mq_notify(3)) that calls `_exit`.
"""

from __future__ import annotations

import ctypes
import os

_SIGEV_THREAD = 2  # of glibc's and musl's <signal.h>


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


def prepare(code: int) -> int | None:
    """Returns the file descriptor of a queue: a message to it ends this process with the code.

    Returns None where the system has no message queues.
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


def trigger(queue: int) -> None:
    """Ends the process that prepared the queue, of which this one inherited the descriptor."""
    ctypes.CDLL(None).mq_send(queue, b"exit", ctypes.c_size_t(4), 0)
