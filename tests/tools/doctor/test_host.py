"""The doctor's lines on ports, memory and shared memory."""

from __future__ import annotations

import pytest

from tfdist.tools.doctor import host


def test_loopback_listens() -> None:
    assert host._port("loopback", "127.0.0.1").state == "ok"


def test_address_of_another_host_is_red() -> None:
    check = host._port("host address", "192.0.2.77")  # reserved for documentation
    assert check.state == "wrong"
    assert check.value.startswith("192.0.2.77: ")
    assert check.fix


def test_little_memory_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = host.psutil.virtual_memory()._replace(available=10**8)
    monkeypatch.setattr(host.psutil, "virtual_memory", lambda: memory)
    assert host._memory().state == "wrong"


def test_reports_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = host.shutil.disk_usage("/")._replace(free=64 * 1024**2)
    monkeypatch.setattr(host.shutil, "disk_usage", lambda _: usage)
    (check,) = host._shared_memory()
    assert check.state == "missing"
    assert "--shm-size" in check.fix
