"""The doctor's all-reduce: its sizes, its result, and the workers that take part."""

from __future__ import annotations

from typing import Any

import pytest

from tfdist.cluster import membership
from tfdist.groups import traffic
from tfdist.tools.doctor import processes
from tfdist.tools.install_horovod import requirements


def test_each_size_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SIZES", (1, 2))
    names = [check.name for check in processes.all_reduce_checks()]
    assert names == ["mirrored x2, 1 MB", "mirrored x2, 2 MB"]


def test_wrong_sum_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SIZES", (1,))
    monkeypatch.setattr(traffic, "measure_all_reduce", lambda *_: (1.0, 1.0))
    (check,) = processes.all_reduce_checks()
    assert check.state == "wrong"
    assert check.value == "wrong result: the sum of 2 ones is 1.0"


def test_size_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    memory: Any = processes.psutil.virtual_memory()._replace(available=10**8)
    monkeypatch.setattr(processes.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(traffic, "measure_all_reduce", lambda *_: (1.0, 2.0))
    names = [check.name for check in processes.all_reduce_checks()]
    assert names == ["mirrored x2, 1 MB", "mirrored x2, 4 MB"]


@pytest.mark.parametrize(
    ("variables", "horovod", "started"),
    [
        ({}, "0.28.1", False),
        ({"HOROVOD_SIZE": "2"}, "0.28.1", True),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "0.28.1", True),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, None, False),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "0.28.1", False),
        ({"OMPI_COMM_WORLD_RANK": "x", "OMPI_COMM_WORLD_SIZE": "2"}, "0.28.1", False),
    ],
)
def test_detects_workers_started_by_horovod(
    variables: dict[str, str], horovod: str | None, started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requirements, "horovod_version", lambda: horovod)
    monkeypatch.setattr(membership, "_discovered", membership.discover)  # again
    monkeypatch.setattr(membership, "_in_use", None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert processes.started_by_horovod() == started
