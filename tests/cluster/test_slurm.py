"""Slurm's compact lists of hosts and tasks, and the addresses derived from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.cluster import Cluster, discover
from tfdist.cluster.environments import slurm
from tfdist.errors import ClusterError


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("node1", ["node1"]),
        ("a,b-c.d", ["a", "b-c.d"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,15]", ["n08", "n09", "n10", "n15"]),
        ("a[1-2],b,c[7]", ["a1", "a2", "b", "c7"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
    ],
)
def test_expands_lists_of_hosts(text: str, hosts: list[str]) -> None:
    assert slurm.expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["n[1-", "n[a-b]", "n]", "n[]", "a,,b"])
def test_invalid_host_list_raises(text: str) -> None:
    with pytest.raises(ClusterError, match="expected the form"):
        slurm.expand_hosts(text)


@given(st.lists(st.integers(0, 999), min_size=1, max_size=20), st.integers(1, 4))
def test_expands_ranges_in_brackets(numbers: list[int], width: int) -> None:
    written = [f"{number:0{width}d}" for number in numbers]
    assert slurm.expand_hosts(f"n[{','.join(written)}]") == [f"n{number}" for number in written]


@pytest.mark.parametrize(
    ("text", "counts"), [("2", [2]), ("2(x3),1", [2, 2, 2, 1]), ("1,4", [1, 4]), ("", [])]
)
def test_expands_numbers_of_tasks(text: str, counts: list[int]) -> None:
    assert slurm.expand_counts(text) == counts


def test_invalid_task_counts_raise() -> None:
    with pytest.raises(ClusterError, match="2x3"):
        slurm.expand_counts("2x3")


def environ(rank: int, size: int, nodes: str, tasks: str, **more: str) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_JOB_ID": "4711",
        **more,
    }


def read(variables: dict[str, str]) -> Cluster:
    return slurm.Slurm().read(variables)


def test_all_ranks_compute_the_same_addresses() -> None:
    seen = [read(environ(rank, 3, "n[1-2]", "2,1")) for rank in range(3)]
    first = seen[0]
    hosts = [address.partition(":")[0] for address in first.addresses]
    ports = [int(address.partition(":")[2]) for address in first.addresses]
    assert hosts == ["n1", "n1", "n2"]
    assert ports == [ports[0], ports[0] + 1, ports[0]]
    assert all(12000 <= port < 32768 for port in ports)
    assert {cluster.addresses for cluster in seen} == {first.addresses}
    assert [cluster.local_size for cluster in seen] == [2, 2, 1]


@pytest.mark.parametrize("tasks", [{}, {"SLURM_NTASKS": "4"}])
def test_batch_script_is_a_single_process(tasks: dict[str, str]) -> None:
    variables = {
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "0",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_TASKS_PER_NODE": "8",
    }
    cluster = discover(variables | tasks)
    assert (cluster.source, cluster.size) == ("one process", 1)
    assert cluster.environments == ("Slurm: batch script or shell, one process",)


def test_components_of_a_heterogeneous_job_are_one_cluster() -> None:
    # The variables of a step describe all of its components, of which two may share a host.
    seen = [read(environ(rank, 4, "n[1-2],n1", "1,2,1", SLURM_HET_SIZE="2")) for rank in range(4)]
    assert len({cluster.addresses for cluster in seen}) == 1
    assert len(set(seen[0].addresses)) == 4
    assert [cluster.local_rank for cluster in seen] == [0, 0, 1, 1]
    assert [cluster.local_size for cluster in seen] == [2, 2, 2, 2]


def test_steps_of_a_job_do_not_share_ports() -> None:
    one, two = (read(environ(0, 2, "n1", "2", SLURM_STEP_ID=step)) for step in "01")
    assert one.addresses != two.addresses


def test_cyclic_distribution_of_tasks() -> None:
    cluster = read(environ(1, 4, "n[1-2]", "2(x2)", SLURM_DISTRIBUTION="cyclic"))
    assert [address[:2] for address in cluster.addresses] == ["n1", "n2", "n1", "n2"]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (environ(0, 3, "n[1-2]", "2"), "3 tasks, but the tasks per node are '2' on nodes"),
        (environ(0, 3, "n[1-2]", "1(x2)"), "3 tasks, but"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "Start the workers with srun"),
        (environ(3, 3, "n[1-3]", "1(x3)"), "rank 3 of 3 workers: expected a rank from 0 to 2"),
        (environ(1, 2, "n[1-2]", "1(x2)", SLURMD_NODENAME="n1"), "--distribution=block"),
        ({"SLURM_PROCID": "x", "SLURM_NTASKS": "2"}, r"\$SLURM_PROCID: expected a number"),
    ],
)
def test_contradictory_variables_raise(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        read(variables)
