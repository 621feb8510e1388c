"""A lock on a folder, so that two runs never write to it at the same time.

The lock is a file that names the host, the process and its start time, and whose modification time
its owner refreshes every few seconds. If the owner was a process on this host that no longer runs,
another process takes the lock over at once; if it was on another host, after a minute without a
refresh. The lock relies only on exclusive file creation, which NFS supports. `flock` would not do:
on some NFS mounts, other hosts do not see it.

In an object store, the lock is an object that its owner rewrites every few seconds, on the
condition that no other process has changed it.
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
from filelock import SoftFileLease, Timeout

import pipelines
from pipelines import storage
from pipelines.storage import ChangedError, RemotePath, Version
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


# ---- in an object store ----


_BUCKET_HEARTBEAT_SECONDS = 10.0
_BUCKET_LEASE_SECONDS = 60.0
#: Amazon's and Azure's stores refuse requests if the clocks differ by more.
_CLOCK_SECONDS = 900.0


class BucketLock:
    """A lock on a folder in an object store."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._path = RemotePath(self._url) / NAME
        self._token = uuid.uuid4().hex
        self._num_beats = 0
        self._identity: dict[str, str] = {}
        self._lost = ""
        self._refreshed = 0.0  # by the clock that runs on while the host is suspended
        self._refreshing = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Acquires the lock. Waits for up to a minute if its owner may have been killed.

        Raises:
            ConfigurationError: Another run holds the lock, or the bucket cannot be written.
        """
        if self._thread is not None:
            return
        try:
            self._identity = self._take()
        except FileNotFoundError:
            raise ConfigurationError(
                f"{self._url} cannot be locked: there is no such bucket. Create it, or use "
                "another one."
            ) from None
        except pipelines.DataError as error:
            raise ConfigurationError(f"{self._url} cannot be locked: {error}") from None
        self._refreshed = time.time()
        self._stop.clear()
        self._thread = threading.Thread(
            target=self._refresh_until_released, name=f"tfdist lock of {self._url}", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Checks that the lock is still held; asks the server if the lease may have expired.

        Raises:
            ConfigurationError: Another run took the lock over, because this process did not refresh
                it in time: it was suspended, or its connection was interrupted.
        """
        if self._thread is not None and time.time() - self._refreshed >= _BUCKET_LEASE_SECONDS:
            self._try_to_refresh()
        if self._lost:
            raise ConfigurationError(
                f"{self._url}: this run lost its lock ({self._lost}), so another run may be "
                "writing to the folder. Stop one of the runs, then resume with --resume auto."
            )

    def release(self) -> None:
        """Releases the lock. Does nothing if this process does not hold it."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
        with contextlib.suppress(OSError, pipelines.DataError):
            if self._is_mine(self._path.read_version()):
                self._path.unlink(missing_ok=True)

    def is_held(self) -> bool:
        """Returns whether another process holds the lock and refreshes it.

        Its age is the difference of two clocks. If they may be wrong, this waits for a refresh.
        """
        with contextlib.suppress(FileNotFoundError):
            version = self._path.read_version()
            age = time.time() - version.modified.timestamp()
            if _owner_has_ended(version) or abs(age) > _BUCKET_LEASE_SECONDS + _CLOCK_SECONDS:
                return False
            if 0 <= age < _BUCKET_LEASE_SECONDS:
                return True
            time.sleep(1.5 * _BUCKET_HEARTBEAT_SECONDS)
            return self._path.read_version().data != version.data
        return False

    def _take(self) -> dict[str, str]:
        """Writes the lock as soon as it is free, and returns the identity of the object."""
        seen: Version | None = None
        since = 0.0
        while True:
            with contextlib.suppress(FileExistsError):
                identity = self._path.write_bytes(self._content(), overwrite=False)
                self._check_conditions()
                return identity
            with contextlib.suppress(FileNotFoundError, ChangedError):
                version = self._path.read_version()
                if self._is_mine(version):  # the response to our write was lost
                    return version.identity
                if seen is None:
                    seen, since = version, time.monotonic()
                expired = time.monotonic() - since >= _BUCKET_LEASE_SECONDS
                if _owner_has_ended(version) or (expired and version.data == seen.data):
                    return self._path.replace(self._content(), version.identity)
                if version.data != seen.data:  # it was refreshed: the owner is alive
                    raise ConfigurationError(self._in_use(version))
            time.sleep(_BUCKET_HEARTBEAT_SECONDS / 20)

    def _check_conditions(self) -> None:
        """Checks that the server refuses to create the lock once more."""
        try:
            self._path.write_bytes(self._content(), overwrite=False)
        except FileExistsError:
            return
        self._path.unlink(missing_ok=True)
        raise ConfigurationError(
            f"{self._url} cannot be locked: the server ignores conditions of writes "
            "(If-None-Match), which keep two runs apart. Use a server that supports them."
        )

    def _refresh_until_released(self) -> None:
        while not self._lost and not self._stop.wait(_BUCKET_HEARTBEAT_SECONDS):
            self._try_to_refresh()

    def _try_to_refresh(self) -> None:
        with self._refreshing:
            now = time.time()
            try:
                self._refresh()
            except ChangedError as error:
                self._lost = str(error)
            except (OSError, pipelines.DataError):
                pass  # no connection; another run may take over when the lease has expired
            else:
                self._refreshed = now

    def _refresh(self) -> None:
        """Rewrites the lock."""
        self._num_beats += 1
        try:
            self._identity = self._path.replace(self._content(), self._identity)
        except ChangedError:
            try:
                version = self._path.read_version()
            except FileNotFoundError:
                raise ChangedError(f"{self._path} was deleted") from None
            if not self._is_mine(version):
                raise ChangedError(f"it is held by {_owner(version)}") from None
            self._identity = version.identity  # the response to an earlier write was lost

    def _content(self) -> bytes:
        # The counter makes each version unique, because some servers identify it by its contents.
        owner = {"host": _host(), "pid": os.getpid(), "started": _start_time(os.getpid())}
        return json.dumps({**owner, "token": self._token, "beat": self._num_beats}).encode()

    def _is_mine(self, version: Version) -> bool:
        return _owner_facts(version).get("token") == self._token

    def _in_use(self, version: Version) -> str:
        return (
            f"{self._url} is in use by another run: {_owner(version)} holds {self._path}. Wait "
            "until it ends, stop it, or use another folder."
        )


def _owner_facts(version: Version) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        facts = json.loads(version.data)
        if isinstance(facts, dict):
            return facts
    return {}


def _owner(version: Version) -> str:
    facts = _owner_facts(version)
    host = str(facts.get("host", "?")).partition("?")[0]
    return f"process {facts.get('pid', '?')} on host {host or '?'}"


def _owner_has_ended(version: Version) -> bool:
    """Returns whether the owner was a process of this host that no longer runs."""
    facts = _owner_facts(version)
    pid = facts.get("pid")
    if facts.get("host") != _host() or not isinstance(pid, int):
        return False
    return _start_time(pid) != facts.get("started")


def _host() -> str:
    """Returns a name for this host and its PID namespace, which differs between containers."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return f"{socket.gethostname()}?{namespace}"


def _start_time(pid: int) -> float | None:
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None
