"""Hides from Python what Linux has and macOS does not; for a PYTHONPATH, so that workers have it.

Names leave modules of the standard library, and files of the kernel do not exist for this project.
"""

import errno
import os
import signal
import socket
import sys
from types import FrameType
from typing import Any

_PACKAGES = ("tfdist", "pipelines", "recipes")
_FOLDERS = ("/proc", "/sys", "/dev/shm", "/etc/os-release")
_EVENTS = ("open", "os.listdir", "os.scandir")
_BETWEEN = ("sitecustomize", "pathlib", "pathlib._local", "genericpath", "shutil")
_ABSENT = {
    os: (
        *("sched_getaffinity", "sched_setaffinity", "memfd_create", "pidfd_open", "eventfd"),
        *("posix_fadvise", "posix_fallocate", "copy_file_range", "splice", "setns", "unshare"),
        *("getrandom", "getxattr", "listxattr", "fdatasync", "O_TMPFILE", "O_DIRECT", "O_PATH"),
    ),
    signal: ("SIGRTMIN", "SIGRTMAX", "SIGPWR", "SIGSTKFLT", "sigtimedwait", "sigwaitinfo"),
    socket: ("TCP_USER_TIMEOUT", "SO_BINDTODEVICE", "SOCK_CLOEXEC", "SOCK_NONBLOCK"),
}


def _check(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in _EVENTS or not str(arguments[0]).startswith(_FOLDERS):
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
