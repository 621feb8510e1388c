"""Every environment is read, and one of several that apply decides, or they are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.test_membership import (
    HOROVODRUN,
    HYDRA,
    OPEN_MPI,
    PYTORCH_JOB,
    SLURM,
    TORCHRUN,
    TRAIN_JOB,
    tf_config,
)
from tests.support import ROOT
from tfdist.cluster import Cluster, discover, environments
from tfdist.errors import ClusterError

Variables = dict[str, str]


def ranks(cluster: Cluster) -> tuple[str, int, int]:
    return cluster.source, cluster.rank, cluster.size


def step(size: int, rank: int = 0, **more: str) -> Variables:
    """A task of a Slurm step on one host."""
    return SLURM | {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_TASKS_PER_NODE": str(size),
        **more,
    }


def mpi(rank: int, size: int, local_size: int) -> Variables:
    numbers = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank % local_size}
    names = numbers | {"LOCAL_SIZE": local_size}
    return {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in names.items()}


def hosts(number: int, index: int = 0) -> Variables:
    """A platform's `TF_CONFIG` with a task on each host."""
    return tf_config(index=index, worker=[f"pod-{i}:2222" for i in range(number)])


#: What tfdist's launcher sets on one host.
LOCAL = tf_config(index=1, worker=["127.0.0.1:2222", "127.0.0.1:2223"])


def test_documentation_lists_every_environment() -> None:
    text = (ROOT / "docs/clusters.md").read_text()
    for environment in environments.TABLE:
        assert getattr(environment, "rank", environment.name) in text


@pytest.mark.parametrize(
    ("variables", "expected", "master"),
    [
        (
            {"JSM_NAMESPACE_RANK": "3", "JSM_NAMESPACE_SIZE": "8", "PMIX_RANK": "3"},
            ("jsrun", 3, 8),
            "",
        ),
        ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "4"}, ("Flux", 1, 4), ""),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, ("PMI", 1, 4), ""),
        (
            {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"},
            ("PALS", 5, 8),
            "",
        ),
        (
            {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n"},
            ("SkyPilot", 1, 2),
            "10.0.0.1:29500",
        ),
        (
            {"DSTACK_NODE_RANK": "0", "DSTACK_NODES_NUM": "2", "DSTACK_MASTER_NODE_IP": "10.0.0.1"},
            ("dstack", 0, 2),
            "10.0.0.1:29500",
        ),
        (
            {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "leader.svc"},
            ("LeaderWorkerSet", 1, 2),
            "leader.svc:29500",
        ),
        (
            {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"},
            ("SageMaker", 1, 2),
            "algo-1:29500",
        ),
        (
            {"VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job", "VC_TASK_INDEX": "1"},
            ("Volcano", 1, 2),
            "job-worker-0.job:29500",
        ),
        (
            {
                "CLUSTER_SPEC": json.dumps(
                    {
                        "cluster": {"workerpool0": ["a:2222"], "workerpool1": ["b:2222"]},
                        "environment": "cloud",
                        "task": {"type": "workerpool1", "index": 0},
                    }
                )
            },
            ("Vertex AI", 1, 2),
            "",
        ),
        (PYTORCH_JOB | {"MASTER_ADDR": "fd00::1"}, ("MASTER_ADDR", 1, 2), "[fd00::1]:23456"),
        # The port at which torchrun's own server listens is in use.
        (
            TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"},
            ("torchrun", 1, 2),
            "job-master-0:23457",
        ),
    ],
)
def test_reads_environments(
    variables: Variables, expected: tuple[str, int, int], master: str
) -> None:
    cluster = discover(variables)
    assert ranks(cluster) == expected
    assert cluster.master == master
    assert not cluster.environments  # there is only one


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        # A launcher in a task, a pod or a step that is alone
        (step(1) | TORCHRUN, ("torchrun", 1, 2)),
        (step(1) | PYTORCH_JOB, ("MASTER_ADDR", 1, 2)),
        (step(1) | hosts(2, 1), ("TF_CONFIG", 1, 2)),
        (step(1) | mpi(1, 2, 2), ("Open MPI", 1, 2)),
        (hosts(1) | mpi(1, 2, 2), ("Open MPI", 1, 2)),
        (hosts(1) | TORCHRUN, ("torchrun", 1, 2)),
        (mpi(0, 1, 1) | hosts(2, 1), ("TF_CONFIG", 1, 2)),
        ({"RANK": "0", "WORLD_SIZE": "1"} | mpi(1, 2, 2), ("Open MPI", 1, 2)),
        # A launcher on every host, or mpirun with a daemon on the other hosts
        (TORCHRUN | {"RANK": "3", "WORLD_SIZE": "4"} | hosts(2, 1), ("torchrun", 3, 4)),
        (TORCHRUN | {"RANK": "3", "WORLD_SIZE": "4"} | TRAIN_JOB, ("torchrun", 3, 4)),
        (SLURM | OPEN_MPI, ("Open MPI", 1, 4)),
        (step(1) | mpi(3, 4, 2), ("Open MPI", 3, 4)),
        (HYDRA | PYTORCH_JOB, ("MPICH / Hydra", 2, 3)),
        # The same processes
        (SLURM | PYTORCH_JOB, ("MASTER_ADDR", 1, 2)),
        (SLURM | {"PMI_RANK": "1", "PMI_SIZE": "2"}, ("Slurm", 1, 2)),
        (hosts(2, 1) | SLURM, ("TF_CONFIG", 1, 2)),
        (LOCAL | HOROVODRUN, ("TF_CONFIG", 1, 2)),
        (LOCAL | mpi(1, 2, 2), ("TF_CONFIG", 1, 2)),
        # mpirun in an interactive shell
        (step(4, SLURM_PTY_PORT="1") | mpi(1, 2, 2), ("Open MPI", 1, 2)),
    ],
)
def test_innermost_environment_decides(
    variables: Variables, expected: tuple[str, int, int]
) -> None:
    cluster = discover(variables)
    assert ranks(cluster) == expected
    texts = cluster.describe_environments()["environments"].split("; ")
    assert len(texts) > 1
    assert texts[0] == f"{expected[0]}: rank {expected[1]} of {expected[2]} (used)"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        # Each host or task would train separately.
        (step(2) | TORCHRUN, r"torchrun: rank 1 of 2, but Slurm: rank 0 of 2.* unset SLURM_PROCID"),
        (step(2) | mpi(0, 4, 4), r"Open MPI: rank 0 of 4, but Slurm: rank 0 of 2"),
        (
            step(2, 1) | {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
            "0 of 1, but",
        ),
        (SLURM | TORCHRUN, "torchrun: rank 1 of 2, but Slurm: rank 1 of 2"),
        (hosts(2, 1) | mpi(1, 2, 2), "TF_CONFIG: rank 1 of 2, but Open MPI: rank 1 of 2"),
        (hosts(2, 1) | mpi(0, 2, 2), "TF_CONFIG: rank 1 of 2, but Open MPI: rank 0 of 2"),
        (hosts(2, 1) | mpi(0, 4, 4), "TF_CONFIG: rank 1 of 2, but Open MPI: rank 0 of 4"),
        (hosts(3) | TORCHRUN, "torchrun: rank 1 of 2, but TF_CONFIG: rank 0 of 3"),
        (step(4, 1) | PYTORCH_JOB, "MASTER_ADDR: rank 1 of 2, but Slurm: rank 1 of 4"),
        ({"SM_HOSTS": "algo-1", "SM_CURRENT_HOST": "algo-1"}, "SM_HOSTS: expected a JSON list"),
        ({"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "b"}, "SM_HOSTS: expected a JSON list"),
        ({"CLUSTER_SPEC": "{}"}, "CLUSTER_SPEC: cluster: Field required"),
    ],
)
def test_contradicting_environments_are_refused(variables: Variables, message: str) -> None:
    with pytest.raises(ClusterError, match=message) as error:
        discover(variables)
    assert "nset" in str(error.value)


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2"},
        {"PBS_JOBID": "7", "PBS_NUM_NODES": "2"},
        {"PBS_NODEFILE": "HOSTFILE"},
        {"PE_HOSTFILE": "HOSTFILE"},
        {"OAR_NODEFILE": "HOSTFILE"},
        {"LSB_MCPU_HOSTS": "n1 4 n2 4"},
        {"NHOSTS": "2"},
        {"PET_NNODES": "1:4", "PET_NODE_RANK": "0"},
        {"JOB_COMPLETION_INDEX": "1"},
        {"PMIX_RANK": "1"},
        {"NODE_RANK": "1", "MASTER_ADDR": "a"},
        {"WORLD_SIZE": "2"},
        {"RANK": "1"},
        {"AWS_BATCH_JOB_NUM_NODES": "2"},
        {"AZ_BATCH_HOST_LIST": "10.0.0.4,10.0.0.5"},
        {"SOME_PLATFORM_NUM_NODES": "2"},
        {"VC_PS_HOSTS": "a", "VC_WORKER_HOSTS": "b,c", "VC_TASK_INDEX": "0", "VC_WORKER_NUM": "2"},
        {"DET_ALLOCATION_ID": "a"},
        # The workers of one host, in a job with several
        {"SLURM_JOB_NUM_NODES": "2"} | tf_config(worker=["127.0.0.1:1", "127.0.0.1:2"]),
    ],
    ids=lambda variables: next(iter(variables)),
)
def test_other_processes_are_named_in_a_warning(
    variables: Variables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts").write_text("n1 4 all.q\nn2 4 all.q\nn2 4 all.q\n")
    (tmp_path / "containers").write_text('{"container_addrs": ["a", "b"], "container_rank": 0}')
    monkeypatch.setattr(environments, "_DETERMINED", tmp_path / "containers")
    variables = {
        name: str(tmp_path / "hosts") if value == "HOSTFILE" else value
        for name, value in variables.items()
    }
    text = environments.warning(variables)
    assert any(name in text or "Determined" in text for name in variables)
    assert "tfdist.launch" in text
    assert discover(variables).environments


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "4"},
        {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "9"},
        {"PBS_NUM_NODES": "1", "PBS_NODEFILE": "/nowhere", "LSB_MCPU_HOSTS": "n1 8"},
        step(1, SLURM_JOB_NUM_NODES="2"),  # one of several independent steps
        TORCHRUN | {"GROUP_WORLD_SIZE": "1", "ROLE_WORLD_SIZE": "2"},
        TRAIN_JOB | {"PET_NODE_RANK": "0", "JOB_COMPLETION_INDEX": "0"},
        hosts(1) | {"JOB_COMPLETION_INDEX": "0"},
        mpi(0, 4, 2) | {"PBS_NUM_NODES": "2"},
        {"NUM_WORKERS": "4", "LOCAL_WORLD_SIZE": "2"},
    ],
    ids=lambda variables: next(iter(variables), "none"),
)
def test_no_warning_without_other_processes(variables: Variables) -> None:
    assert not environments.warning(variables)
