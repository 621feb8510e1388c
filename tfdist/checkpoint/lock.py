"""A lock on a folder, so that two runs never write to it at the same time.

The lock is a file that names the host, the process and its start time, and whose modification time
its owner refreshes every few seconds. If the owner was a process on this host that no longer runs,
another process takes the lock over at once; if it was on another host, after a minute without a
refresh. The lock relies only on exclusive file creation, which NFS supports. `flock` would not do:
on some NFS mounts, other hosts do not see it.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
from pathlib import Path

from filelock import SoftFileLease, Timeout

from pipelines import storage
from tfdist.checkpoint.bucket_lock import BucketLock
from tfdist.errors import ConfigurationError

NAME = ".lock"

_HEARTBEAT_SECONDS = 2.0
_LEASE_SECONDS = 60.0


def lock_of(folder: str | os.PathLike[str]) -> FolderLock | BucketLock:
    """Returns the lock of a local folder or of one in an object store; it is not acquired yet."""
    path = os.fspath(folder)
    return BucketLock(path) if storage.is_object_store(path) else FolderLock(path)


class FolderLock:
    """A lock on a folder.

    Locking has no effect in a folder that cannot be written, and on remote file systems other than
    object stores.

    Args:
        folder: The folder to lock; is created if it does not exist.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = os.fspath(folder)
        self._lease: SoftFileLease | None = None

    def acquire(self) -> None:
        """Acquires the lock.

        Raises:
            ConfigurationError: Another run holds the lock.
        """
        if "://" in self._folder or self._lease is not None:
            return
        path = posixpath.join(self._folder, NAME)
        lease = SoftFileLease(
            path,
            lease_duration=_LEASE_SECONDS,
            heartbeat_interval=_HEARTBEAT_SECONDS,
            thread_local=False,
        )
        try:
            Path(self._folder).mkdir(parents=True, exist_ok=True)
            seen = _modified(path)
            # Stop waiting when the lock is refreshed, because then its owner is alive.
            lease.acquire(
                timeout=_LEASE_SECONDS + 2 * _HEARTBEAT_SECONDS,
                poll_interval=_HEARTBEAT_SECONDS / 10,
                cancel_check=lambda: _modified(path) not in (seen, None),
            )
        except Timeout:
            raise ConfigurationError(_in_use(self._folder, lease, path)) from None
        except OSError:
            return  # writing to the folder will raise an error that explains why
        self._lease = lease

    def check(self) -> None:
        """Checks that the lock is still held.

        Raises:
            ConfigurationError: Another run took the lock over, because this process was suspended
                and did not refresh it in time.
        """
        if self._lease is not None and self._lease.compromise is not None:
            raise ConfigurationError(
                f"{self._folder}: this run lost its lock ({self._lease.compromise.reason}), so "
                "another run may be writing to the folder. Stop one of the runs, then resume with "
                "--resume auto."
            )

    def is_held(self) -> bool:
        """Returns whether another running process holds the lock."""
        try:
            self.acquire()
        except ConfigurationError:
            return True
        self.release()
        return False

    def release(self) -> None:
        """Releases the lock. Does nothing if this process does not hold it."""
        if self._lease is not None:
            lease, self._lease = self._lease, None
            with contextlib.suppress(OSError):
                lease.release()


def _modified(path: str) -> int | None:
    """Returns when a file was last modified, in nanoseconds; None if it does not exist."""
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return None


def _in_use(folder: str, lease: SoftFileLease, path: str) -> str:
    owner = lease.owner
    if owner is None:
        return f"{folder} is in use by another run, which holds {path}: use another folder."
    host = owner.hostname.partition("?")[0]  # without filelock's mark of the PID namespace
    return (
        f"{folder} is in use by another run: process {owner.pid} on host {host} holds {path}. Wait "
        "until it ends, stop it, or use another folder."
    )
