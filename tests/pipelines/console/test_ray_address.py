"""A Ray cluster that nothing answers for is reported without waiting for Ray."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pipelines.console import ray_tasks


@pytest.fixture
def port() -> int:
    """A port of this host that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(autouse=True)
def current_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that names the cluster which `ray start` has started; it does not exist yet."""
    path = tmp_path / "ray_current_cluster"
    monkeypatch.setattr(ray_tasks, "_CURRENT_CLUSTER", path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return path


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}", "127.0.0.1:{}00000"])
def test_address_without_an_answer(monkeypatch: pytest.MonkeyPatch, port: int, form: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", form.format(port))
    with pytest.raises(ConnectionError, match=rf"no answer from {form.format(port)} \("):
        ray_tasks.check_reachable()


def test_cluster_that_has_ended_without_a_trace(current_cluster: Path, port: int) -> None:
    current_cluster.write_text(f"127.0.0.1:{port}\n")
    with pytest.raises(ConnectionError, match="RAY_ADDRESS=local starts a new cluster"):
        ray_tasks.check_reachable()


def test_other_addresses_are_left_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_tasks.check_reachable()
    with socket.create_server(("127.0.0.1", 0)) as server:
        for address in ("local", "auto", "nonsense", f"127.0.0.1:{server.getsockname()[1]}"):
            monkeypatch.setenv("RAY_ADDRESS", address)
            ray_tasks.check_reachable()
