"""The ranks of Horovod's Gloo know who is missing before Gloo waits for them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfdist.cluster.liveness import roll_call, silent
from tfdist.cluster.networks import held_ports
from tfdist.errors import ClusterError
from tfdist.launcher import horovod
from tfdist.launcher.plan import LOCAL, slots

pytestmark = pytest.mark.skipif(not horovod.installed(), reason="no Horovod: make horovod")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """That of a launcher, as its workers' variables name it."""
    with held_ports(1) as (port,):
        pass
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(port))
    with horovod.serving(slots({LOCAL: 3}), port):
        yield


@pytest.mark.usefixtures("server")
def test_all_go_on_when_all_have_come() -> None:
    with ThreadPoolExecutor(3) as pool:
        places = list(pool.map(lambda rank: roll_call(rank, 3, 60.0), range(3)))
    assert [sorted(of_others) for of_others in places] == [[1, 2], [0, 2], [0, 1]]
    with socket.create_server(("127.0.0.1", 0)) as stopped:  # takes connections, and no bytes
        assert silent(places[0]) == []
        assert silent({2: f"127.0.0.1:{stopped.getsockname()[1]}"}, seconds=0.5) == [2]


@pytest.mark.usefixtures("server")
def test_who_is_missing_is_named() -> None:
    with pytest.raises(ClusterError, match="Rank 1 of 3 waited 0 s in start-up for rank 0 and r"):
        roll_call(1, 3, 0.0)


def test_a_launcher_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    with held_ports(1) as (port,):
        monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
        monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(port))
        with pytest.raises(ClusterError, match=f"cannot reach the launcher's server at .*{port}"):
            roll_call(0, 2)


def test_without_such_a_server_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", raising=False)
    assert not roll_call(0, 2, 0.0)
