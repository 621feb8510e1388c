"""Launchers that bind a worker to a few of the host's cores are reported."""

from __future__ import annotations

import os

import pytest

from tfdist.cluster import record


@pytest.mark.parametrize(
    ("own", "local_size", "rows"),
    [
        (
            1,
            2,
            {"cores": "1 of 8: the launcher binds each worker to cores; use mpirun --bind-to none"},
        ),
        (4, 2, {}),
        (8, 2, {}),
        (8, 1, {}),
    ],
)
def test_reports_idle_cores(
    own: int, local_size: int, rows: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = {0: range(own), os.getppid(): range(8)}
    monkeypatch.setattr(os, "sched_getaffinity", cores.__getitem__)
    assert record.describe_binding(local_size) == rows


def test_unknown_affinity_of_the_launcher_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def affinity(process_id: int) -> set[int]:
        if process_id:
            raise PermissionError
        return {0}

    monkeypatch.setattr(os, "sched_getaffinity", affinity)
    assert record.describe_binding(2) == {}
