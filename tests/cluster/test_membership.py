"""The cluster described by each launcher's environment variables, and contradictions in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tfdist import cluster
from tfdist.cluster import Cluster, discover, membership
from tfdist.errors import ClusterError

ADDRESSES = ["10.0.0.1:2222", "10.0.0.1:2223", "10.0.0.2:2222"]
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
HOROVODRUN = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
}
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_JOB_ID": "9",
}
PYTORCH_JOB = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
}
TORCHRUN = PYTORCH_JOB | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TRAIN_JOB = {"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_MASTER_ADDR": "job-0-0"}


def tf_config(task: str = "worker", index: Any = 0, **tasks: Any) -> dict[str, str]:
    tasks = tasks or {"worker": ADDRESSES}
    return {"TF_CONFIG": json.dumps({"cluster": tasks, "task": {"type": task, "index": index}})}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    membership._discovered.cache_clear()
    membership._in_use = membership._hook = None


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("one process", 0, 1, 0, 1)),
        ({"TF_CONFIG": "{}"}, ("one process", 0, 1, 0, 1)),
        (tf_config(index=1), ("TF_CONFIG", 1, 3, 1, 2)),
        (tf_config(index=2), ("TF_CONFIG", 2, 3, 0, 1)),
        (SLURM, ("Slurm", 1, 2, 0, 1)),
        (OPEN_MPI, ("Open MPI", 1, 4, 1, 2)),
        (HYDRA, ("MPICH / Hydra", 2, 3, 0, 1)),
        (HOROVODRUN, ("Horovod", 1, 2, 1, 2)),
        (PYTORCH_JOB, ("MASTER_ADDR", 1, 2, 0, 1)),
        (TORCHRUN, ("torchrun", 1, 2, 1, 2)),
        (TRAIN_JOB, ("TrainJob", 1, 2, 0, 1)),
    ],
)
def test_reads_the_variables_of_each_launcher(environ: dict[str, str], expected: tuple) -> None:
    result = discover(environ)
    got = (result.source, result.rank, result.size, result.local_rank, result.local_size)
    assert got == expected


def test_flags_override_environment_variables() -> None:
    result = discover(tf_config() | SLURM, workers=["a:1", "b:1", "b:2"], rank=2)
    assert (result.source, result.rank, result.size, result.local_rank) == ("flags", 2, 3, 1)
    assert result.address == "b:2"


def test_parameter_servers_and_evaluator_are_not_workers() -> None:
    tasks = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1", "e:1"]}
    names = ("chief", "worker", "worker", "ps", "ps", "evaluator")
    indices = (0, 0, 1, 0, 1, 0)
    seen = [
        discover(tf_config(task, index, **tasks))
        for task, index in zip(names, indices, strict=True)
    ]
    assert [found.rank for found in seen] == list(range(6))
    assert tuple(found.index for found in seen) == indices
    assert [found.address for found in seen] == ["a:1", "b:1", "c:1", "d:1", "e:1", ""]
    assert [found.is_chief for found in seen] == [True] + 5 * [False]
    assert all(found.size == 3 and found.tasks() == tasks for found in seen)


@pytest.mark.parametrize("address", ["::1:2222", "[::1]:2222"])
def test_ipv6_addresses_get_brackets(address: str) -> None:
    cluster = discover(tf_config(worker=[address, "b:1"]))
    assert cluster.addresses == ("[::1]:2222", "b:1")
    assert cluster.tasks() == {"worker": ["[::1]:2222", "b:1"]}


def test_master_address_comes_from_the_job() -> None:
    assert discover(PYTORCH_JOB).master == "job-master-0:23456"
    assert discover(TRAIN_JOB).master == "job-0-0:29500"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"TF_CONFIG": "{worker"}, "TF_CONFIG: value: Invalid JSON"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, "TF_CONFIG: task: Field required"),
        (tf_config(workers=["a:1"]), "TF_CONFIG: cluster.workers: Extra inputs"),
        (tf_config("master"), "TF_CONFIG: task.type: Input should be"),
        (tf_config(index=-1), "TF_CONFIG: task.index"),
        (
            tf_config(index=3),
            "worker 3, but the cluster has 3 tasks of that type. Use an index from 0 to 2",
        ),
        (tf_config("chief"), "chief 0, but the cluster has no such task"),
        (tf_config("ps", ps=["a:1"]), 'no "worker" or "chief" task'),
        (tf_config(chief=["a:1", "a:2"]), "TF_CONFIG: cluster.chief: List should have at most 1"),
        (tf_config(worker=["a:1", "a:1"]), "has the address a:1 for two tasks"),
        (tf_config(worker=["a:1"], ps=["a:1"]), "has the address a:1 for two tasks"),
        (tf_config(worker=["a"]), "Address 'a': expected host:port"),
        (tf_config(worker=["a:70000"]), "port from 1 to 65535"),
        (tf_config(worker=["fd00:77::1"]), "Address 'fd00:77::1': expected host:port"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "4"}, "Open MPI has rank 4 of 4 workers"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "local rank 2 of 2"),
        ({"PMI_RANK": "0"}, r"\$PMI_SIZE: expected a number of at least 0, it is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, r"\$MASTER_ADDR is not set"),
        (PYTORCH_JOB | {"RANK": "one"}, r"\$RANK: expected a number of at least 0, got 'one'"),
        (PYTORCH_JOB | {"RANK": "2"}, "MASTER_ADDR has rank 2 of 2"),
    ],
)
def test_contradictory_variables_raise(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ClusterError, match=message) as error:
        discover(environ)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"workers": ["a:1", "b:1"]}, "Give each worker a different --rank from 0 to 1"),
        ({"workers": ["a:1", "b:1"], "rank": 2}, "--rank is 2"),
        ({"workers": ["a:1", "a:1"], "rank": 0}, "flags has the address a:1 for two tasks"),
        ({"rank": 0}, "--rank 0 needs --workers"),
    ],
)
def test_contradictory_flags_raise(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        discover({}, **flags)


def test_description_lists_the_workers() -> None:
    assert discover(tf_config(index=1)).describe() == {
        "cluster": "rank 1 of 3, 2 on this host, from TF_CONFIG",
        "workers": "10.0.0.1:2222, 10.0.0.1:2223, 10.0.0.2:2222",
    }


def test_public_functions_use_the_current_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    assert (cluster.rank(), cluster.size(), cluster.is_chief()) == (1, 4, False)
    cluster.use(Cluster("flags", rank=0, size=2))
    assert (cluster.rank(), cluster.size(), cluster.is_chief()) == (0, 2, True)


def test_barrier_uses_the_strategy() -> None:
    calls = []
    cluster.barrier()  # alone
    cluster.use(Cluster("flags", rank=0, size=2))
    with pytest.raises(ClusterError, match="before a strategy connected them"):
        cluster.barrier()
    cluster.on_barrier(lambda: calls.append(1))
    cluster.barrier()
    assert calls == [1]
