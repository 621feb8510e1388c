"""Two runs cannot write to one folder, and the lock of a killed run does not block the next."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.checkpoint.training import repeatable
from tests.support.starting import piped, wait_for_line
from tests.support.training import X, Y
from tfdist.checkpoint import lock
from tfdist.checkpoint.lock import FolderLock
from tfdist.errors import ConfigurationError

_HOLDER = """
import sys, time
from tfdist.checkpoint.lock import FolderLock
held = FolderLock(sys.argv[1])
held.acquire()
print("held", flush=True)
time.sleep(600)
"""


def test_lock_refuses_a_second_run_and_survives_a_kill(tmp_path: Path) -> None:
    with piped(sys.executable, "-c", _HOLDER, str(tmp_path)) as process:
        wait_for_line(process, "held")
        with pytest.raises(ConfigurationError, match=rf"in use .*process {process.pid} on host"):
            repeatable(tmp_path).fit(X, Y, epochs=1, verbose=0)
    assert (tmp_path / lock.NAME).exists()
    repeatable(tmp_path).fit(X, Y, epochs=1, verbose=0)
    assert not (tmp_path / lock.NAME).exists()


def test_expired_lock_of_another_host_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_LEASE_SECONDS", 0.5)
    monkeypatch.setattr(lock, "_HEARTBEAT_SECONDS", 0.1)
    other = FolderLock(tmp_path)
    other.acquire()
    other.release()
    (tmp_path / lock.NAME).write_text(
        "filelock/2\npid=1\nhost=another\nmode=lease\ntoken=ab\nduration=0.5\n"
    )
    mine = FolderLock(tmp_path)
    mine.acquire()
    assert "another" not in (tmp_path / lock.NAME).read_text()
    mine.check()
    mine.release()


def test_lost_lock_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_HEARTBEAT_SECONDS", 0.05)
    mine = FolderLock(tmp_path)
    mine.acquire()
    (tmp_path / lock.NAME).unlink()
    assert mine._lease is not None
    mine._lease._claim.heartbeat.thread.join(timeout=60)
    with pytest.raises(ConfigurationError, match="lost its lock"):
        mine.check()
    mine.release()


def test_fit_releases_the_lock_on_success_and_failure(tmp_path: Path) -> None:
    for epochs in (1, 2):
        repeatable(tmp_path).fit(X, Y, epochs=epochs, verbose=0)
    with pytest.raises(ConfigurationError, match="already has checkpoints"):
        repeatable(tmp_path, resume="never").fit(X, Y, epochs=1, verbose=0)
    assert not (tmp_path / lock.NAME).exists()
