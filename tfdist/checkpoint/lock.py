"""A lock on a folder, so that two runs never write to it at the same time.

The lock is a file that names the host, the process and its start time, and whose modification time
its owner refreshes every few seconds. It is taken over at once if the owner was a process of this
host that no longer runs, and after a minute without a refresh if the owner was on another host.
Only the exclusive creation of a file is needed, which NFS provides too; a lock of the kernel
(`flock`) is not seen by other hosts on every NFS mount.
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

    The lock does nothing in a folder that cannot be written, and on remote file systems other than
    object stores.

    Args:
        folder: The folder to lock; is created if it does not exist.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = os.fspath(folder)
        self._lease: SoftFileLease | None = None

    def acquire(self) -> None:
        """Takes the lock.

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
            # A refresh while we wait shows that the owner is alive: then waiting is pointless.
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
                for so long that it seemed to have ended.
        """
        if self._lease is not None and self._lease.compromise is not None:
            raise ConfigurationError(
                f"{self._folder}: this run lost its lock ({self._lease.compromise.reason}), and "
                "another run may write to the folder now. Stop one of them, and resume with "
                "--resume auto."
            )

    def is_held(self) -> bool:
        """Returns whether another process that is alive holds the lock."""
        try:
            self.acquire()
        except ConfigurationError:
            return True
        self.release()
        return False

    def release(self) -> None:
        """Gives the lock back; does nothing if it is not held."""
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
