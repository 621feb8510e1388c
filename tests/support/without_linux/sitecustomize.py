"""Hides from Python what Linux has and macOS does not; for a PYTHONPATH, so that workers have it.

Names are removed from modules of the standard library, and files of the kernel do not exist for the
code of this project. Other packages read them as before, because their builds are for Linux.
"""

import errno
import os
import select
import signal
import socket
import sys
from types import FrameType
from typing import Any

_PACKAGES = ("tfdist", "pipelines", "recipes")
_FOLDERS = ("/proc", "/sys", "/dev/shm", "/etc/os-release")
_BETWEEN = ("sitecustomize", "pathlib", "pathlib._local", "genericpath", "shutil")
_ABSENT = {
    os: (
        *("sched_getaffinity", "sched_setaffinity", "memfd_create", "pidfd_open", "eventfd"),
        *("posix_fadvise", "posix_fallocate", "copy_file_range", "splice", "setns", "unshare"),
        *("getrandom", "getresuid", "getxattr", "listxattr", "fdatasync", "process_cpu_count"),
        *("O_TMPFILE", "O_DIRECT", "O_PATH", "CLONE_NEWNS"),
    ),
    select: ("epoll",),
    signal: ("SIGRTMIN", "SIGRTMAX", "SIGPWR", "SIGSTKFLT", "sigtimedwait", "sigwaitinfo"),
    socket: ("TCP_USER_TIMEOUT", "SO_BINDTODEVICE", "SOCK_CLOEXEC", "SOCK_NONBLOCK"),
}


def _check(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in ("open", "os.listdir", "os.scandir"):
        return
    if not str(arguments[0]).startswith(_FOLDERS):
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals["__name__"] in _BETWEEN:
        frame = frame.f_back
    if frame is not None and frame.f_globals["__name__"].startswith(_PACKAGES):
        raise FileNotFoundError(errno.ENOENT, "hidden", str(arguments[0]))


def _stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
    _check("open", (path,))
    return _system_stat(path, *arguments, **options)


for _module, _names in _ABSENT.items():
    for _name in _names:
        if hasattr(_module, _name):
            delattr(_module, _name)
_system_stat, os.stat = os.stat, _stat
sys.addaudithook(_check)
