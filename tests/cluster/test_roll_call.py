"""The ranks of Horovod's Gloo detect missing ranks before Gloo waits for them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.commands import needs_horovod
from tfdist.cluster import liveness
from tfdist.cluster.launcher import plan
from tfdist.cluster.launcher.plan import LOCAL, slots
from tfdist.cluster.liveness import roll_call, silent
from tfdist.cluster.networks import reserved_ports
from tfdist.errors import ClusterError

pytestmark = needs_horovod


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The rendezvous server of a launcher, as in its workers' environment variables."""
    with reserved_ports(1) as (port,):
        pass
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(port))
    with plan.horovod_rendezvous(slots({LOCAL: 3}), port):
        yield


@pytest.mark.usefixtures("server")
def test_continues_when_all_ranks_are_present() -> None:
    with ThreadPoolExecutor(3) as pool:
        places = list(pool.map(lambda rank: roll_call(rank, 3, 60.0), range(3)))
    assert [sorted(of_others) for of_others in places] == [[1, 2], [0, 2], [0, 1]]
    with socket.create_server(("127.0.0.1", 0)) as stopped:  # accepts, but sends nothing
        assert silent(places[0]) == []
        assert silent({2: f"127.0.0.1:{stopped.getsockname()[1]}"}, seconds=0.5) == [2]


@pytest.mark.usefixtures("server")
def test_all_ranks_report_missing_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_EXTRA_SECONDS", 0.0)
    with pytest.raises(ClusterError, match=r"Rank 1 of 3 waited 0 s in start-up for rank 0\."):
        roll_call(1, 3, 0.0)
    for rank in (0, 1):  # learns it from rank 0
        with pytest.raises(ClusterError, match=rf"Rank {rank} of 3 waited 0 s .* for rank 2\."):
            roll_call(rank, 3, 0.0)


@pytest.mark.usefixtures("server")
def test_number_of_requests_is_proportional_to_the_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests: list[str] = []
    read = liveness._registered

    def counted(key: str) -> str:
        requests.append(key)
        return read(key)

    monkeypatch.setattr(liveness, "_registered", counted)
    monkeypatch.setattr(liveness, "start_responder", lambda: 1)
    size = 32
    for rank in range(1, size):
        liveness._register(str(rank), f"127.0.0.1:{rank}")
    assert len(roll_call(0, size)) == size - 1
    for rank in range(1, size):
        assert len(roll_call(rank, size)) == size - 1
    assert len(requests) == 2 * size - 1


def test_launcher_that_exited_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserved_ports(1) as (port,):
        monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
        monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(port))
        with pytest.raises(
            ClusterError, match=f"Cannot connect to the launcher's server at .*{port}"
        ):
            roll_call(0, 2)


def test_without_a_server_no_rank_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", raising=False)
    assert not roll_call(0, 2, 0.0)
