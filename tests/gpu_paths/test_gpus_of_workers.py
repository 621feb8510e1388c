"""Which GPUs each worker of a host uses, with mocked GPUs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tfdist import cluster
from tfdist.cluster import Cluster, exchange_addresses, gpus
from tfdist.cluster.launcher import plan
from tfdist.cluster.launcher.options import parse
from tfdist.cluster.networks import free_ports
from tfdist.errors import ClusterError, ConfigurationError
from tfdist.groups import collective
from tfdist.strategies.parameter_server.cluster import server_options

SECONDS = 30.0
#: Inherited values of CUDA_VISIBLE_DEVICES, given the number of GPUs.
INHERITED = {
    "not set": lambda number: None,
    "indices": lambda number: ",".join(str(8 + i) for i in range(number)),
    "UUIDs": lambda number: ",".join(f"GPU-{8 + i:02d}-abcdef" for i in range(number)),
}


@pytest.fixture(autouse=True)
def _host_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a host with 16 GPUs."""
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    monkeypatch.delenv(gpus.PER_WORKER, raising=False)
    monkeypatch.setattr(gpus, "installed", lambda: [f"GPU-{i:02d}-abcdef" for i in range(16)])


def inherit(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is not None:
        monkeypatch.setenv(gpus.VISIBLE, value)


def visible_by_worker(num_workers: int, num_gpus: int) -> list[str]:
    """Returns the CUDA_VISIBLE_DEVICES that the launcher sets for each worker."""
    planned = plan.workers(["run"], plan.slots({plan.LOCAL: num_workers}), gpus_per_worker=num_gpus)
    return [process.environ[gpus.VISIBLE] for process in planned.processes]


@pytest.mark.parametrize("inherited", INHERITED)
@pytest.mark.parametrize(
    ("num_gpus", "num_workers"), itertools.product([1, 2, 4, 8], [1, 2, 4]), ids=str
)
def test_launcher_divides_its_gpus(
    num_gpus: int, num_workers: int, inherited: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = INHERITED[inherited](num_gpus)
    inherit(monkeypatch, value)
    monkeypatch.setattr(gpus, "installed", lambda: [f"GPU-{i}" for i in range(num_gpus)])
    each = num_gpus // num_workers
    if not each:
        with pytest.raises(ConfigurationError, match="--gpus-per-worker 1 needs"):
            visible_by_worker(num_workers, 1)
        return
    entries = value.split(",") if value else [str(i) for i in range(num_gpus)]
    wanted = [entries[i * each : (i + 1) * each] for i in range(num_workers)]
    assert [text.split(",") for text in visible_by_worker(num_workers, each)] == wanted


def test_entries_after_an_invalid_one_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    inherit(monkeypatch, "3,-1,5")
    with pytest.raises(ConfigurationError, match="CUDA_VISIBLE_DEVICES=3,-1,5"):
        visible_by_worker(2, 1)


def test_gpus_of_other_hosts_are_counted_from_0(monkeypatch: pytest.MonkeyPatch) -> None:
    inherit(monkeypatch, "6,7")
    slots = plan.slots({"a": 2, "b": 2})
    planned = plan.workers(
        ["run"], slots, ports=plan.ports_from(5000, slots), gpus_per_worker=1, here="a"
    )
    assert [one.environ[gpus.VISIBLE] for one in planned.processes] == ["6", "7", "0", "1"]


def test_excluded_slot_keeps_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    inherit(monkeypatch, "4,5,6")
    slots = plan.slots({plan.LOCAL: 2})
    planned = plan.workers(["run"], slots, gpus_per_worker=1, gpu_slots=[0, 2])
    assert [one.environ[gpus.VISIBLE] for one in planned.processes] == ["4", "6"]


def test_workers_of_parameter_servers_have_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    inherit(monkeypatch, "4,5,6")
    options = parse(["--num-ps", "1", "--num-workers", "2", "--gpus-per-worker", "1", "--", "run"])
    planned = plan.with_parameter_servers(options.command, 2, 1, options.gpus_per_worker)
    seen = {process.name: process.environ[gpus.VISIBLE] for process in planned}
    assert seen == {"chief": "-1", "worker 0": "4", "worker 1": "5", "ps 0": "-1"}


@pytest.mark.parametrize(
    ("task", "index", "num_gpus", "per_worker", "used"),
    [
        ("worker", 0, 2, False, "0"),
        ("worker", 1, 2, False, "1"),
        ("worker", 2, 2, False, "0"),  # shared: no NCCL is involved
        ("worker", 1, 1, True, "0"),
        ("ps", 0, 2, False, ""),
        ("worker", 1, 0, False, ""),
    ],
)
def test_gpu_of_a_server_process(
    task: str, index: int, num_gpus: int, per_worker: bool, used: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if per_worker:
        monkeypatch.setenv(gpus.PER_WORKER, "1")
    addresses = tuple(f"a:{2222 + i}" for i in range(3))
    rank = 3 if task == "ps" else index
    mine = Cluster("TF_CONFIG", rank, 3, addresses=addresses, task=task, ps=("a:3000",))
    options = server_options(mine, num_gpus)
    assert options.device_count["GPU"] == (1 if used else 0)
    assert options.gpu_options.visible_device_list == used


def clusters(size: int) -> list[Cluster]:
    addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(size))
    return [Cluster("flags", rank, size, addresses=addresses) for rank in range(size)]


def exchange(claims: Sequence[Sequence[str]], share: bool = False) -> list[Any]:
    """Returns the indices of the GPUs that each worker gets, or its error."""

    def worker(mine: Cluster) -> Any:
        try:
            return exchange_addresses(mine, SECONDS, claims[mine.rank], share).gpus
        except ClusterError as error:
            return str(error)

    with ThreadPoolExecutor(len(claims)) as pool:
        return list(pool.map(worker, clusters(len(claims))))


@pytest.mark.parametrize("inherited", INHERITED)
@pytest.mark.parametrize(
    ("num_gpus", "num_workers"), itertools.product([1, 2, 4, 8], [1, 2, 4]), ids=str
)
def test_workers_that_see_the_same_gpus_divide_them(
    num_gpus: int, num_workers: int, inherited: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inherit(monkeypatch, INHERITED[inherited](num_gpus))
    monkeypatch.setattr(gpus, "installed", lambda: [f"GPU-{i:02d}-abcdef" for i in range(num_gpus)])
    result = exchange([gpus.identifiers(num_gpus)] * num_workers)
    each = num_gpus // num_workers
    if each:
        wanted = [tuple(range(i * each, (i + 1) * each)) for i in range(num_workers)]
        assert result == wanted
    else:
        assert all("NCCL needs at least one per worker: start at most" in e for e in result)


def test_workers_with_separate_gpus_keep_them() -> None:
    assert exchange([["GPU-a", "GPU-b"], ["GPU-c", "GPU-d"]]) == [(0, 1), (0, 1)]


def test_hosts_divide_their_gpus_separately() -> None:
    claims = [["GPU-a", "GPU-b"], ["GPU-c", "GPU-d"], ["GPU-a", "GPU-b"], ["GPU-d", "GPU-c"]]
    assert exchange(claims) == [(0,), (0,), (1,), (0,)]


def test_ring_shares_a_gpu() -> None:
    assert exchange([["GPU-a"]] * 3, share=True) == [(0,), (0,), (0,)]


def test_overlapping_gpus_raise_on_every_worker() -> None:
    result = exchange([["GPU-a", "GPU-b"], ["GPU-b"]])
    assert all("use different sets of GPUs that overlap in GPU-" in error for error in result)


@pytest.mark.parametrize("value", ["1,1", "1, 01", "0,GPU-00", "GPU-00-abcdef,GPU-00", "2,3,2"])
def test_gpu_that_occurs_twice_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inherit(monkeypatch, value)
    with pytest.raises(ConfigurationError, match=r"names the GPU \S+ twice. Name each GPU once"):
        visible_by_worker(2, 1)


def test_thousands_of_workers_are_divided_at_once() -> None:
    hosts = [[f"GPU-{host}-{i}" for i in range(8)] for host in range(512)]
    divided = gpus.divide([hosts[rank // 8] for rank in range(4096)], share=False)
    assert divided == [[rank % 8] for rank in range(4096)]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, ["GPU-00-abcdef", "GPU-01-abcdef"]),
        ("5,2", ["GPU-05-abcdef", "GPU-02-abcdef"]),
        ("GPU-05,MIG-x", ["GPU-05-abcdef", "MIG-x"]),
    ],
)
def test_visible_devices_become_gpu_identifiers(
    value: str | None, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "installed", lambda: [f"GPU-{i:02d}-abcdef" for i in range(8)])
    if value is None:
        monkeypatch.setattr(gpus, "installed", lambda: wanted)
    inherit(monkeypatch, value)
    assert gpus.identifiers(2) == wanted


def test_identifiers_without_nvidia_smi_name_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "installed", list)
    monkeypatch.setattr(gpus.socket, "gethostname", lambda: "node7")
    assert gpus.identifiers(2) == ["node7:0", "node7:1"]


@pytest.mark.parametrize("answer", ["echo GPU-a; echo GPU-b", "echo broken >&2; exit 9"])
def test_identifiers_come_from_nvidia_smi(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{answer}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpus.installed() == (["GPU-a", "GPU-b"] if "GPU-a" in answer else [])


@pytest.mark.parametrize(
    ("asked", "shown", "names"),
    [
        (None, [2, 3], ["GPU:0", "GPU:1"]),
        (1, [2, 3], ["GPU:0"]),
        (["GPU:1", "GPU:3"], [3], ["GPU:0"]),
    ],
)
def test_second_worker_of_two_is_shown_its_gpus(
    asked: Any, shown: list[int], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(4)]
    cpu = tf.config.list_physical_devices("CPU")
    state = {"GPU": seen, "CPU": cpu}
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: state[kind])
    monkeypatch.setattr(
        tf.config, "set_visible_devices", lambda devices, kind: state.update({kind: devices})
    )
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda device: None)
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", lambda device, value: None)
    monkeypatch.setattr(collective, "has_started", lambda: False)
    first, second = clusters(2)
    claims = [f"GPU-{i:02d}-abcdef" for i in range(4)]
    claims = claims if isinstance(asked, (int, type(None))) else [claims[1], claims[3]]
    monkeypatch.setattr(gpus, "installed", lambda: [f"GPU-{i:02d}-abcdef" for i in range(4)])
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        stack.callback(cluster.leave)
        other = pool.submit(exchange_addresses, first, SECONDS, claims)
        whole, found = collective._meet(second, asked, "auto", 1)
        other.result()
    assert [seen.index(device) for device in state["GPU"]] == shown
    assert found == names
    assert whole.rank == 1
