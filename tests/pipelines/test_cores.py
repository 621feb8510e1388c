"""The number of cores that a process may use, in containers and under schedulers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipelines import cores


@pytest.mark.parametrize(
    ("process", "files", "threads", "expected"),
    [
        ("0::/", {}, "", 8),
        ("0::/", {"cpu.max": "max 100000"}, "", 8),
        ("0::/", {"cpu.max": "250000 100000"}, "", 3),
        ("0::/a/b", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, "", 2),
        ("0::/../x", {"cpu.max": "50000 100000"}, "", 1),
        (
            "3:cpu,cpuacct:/job\n2:memory:/",
            {"cpu,cpuacct/job/cpu.cfs_quota_us": "400000\n",
             "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n"},
            "",
            4,
        ),
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "", 8),
        ("0::/", {"cpu.max": "broken"}, "", 8),
        ("", {}, "5", 5),
        ("0::/", {"cpu.max": "250000 100000"}, "4,2", 3),
        ("", {}, "0", 1),
        ("", {}, "many", 8),
    ],
)  # fmt: skip
def test_smallest_limit_decides(
    process: str,
    files: dict[str, str],
    threads: str,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "process").write_text(process)
    monkeypatch.setattr(cores, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(cores, "_OF_PROCESS", tmp_path / "process")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert cores.num_cores() == expected
