"""Packing by the cores of a Ray cluster gives the bytes of packing on one machine."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from pipelines import DataError
from pipelines.console import ray_tasks
from pipelines.pack.__main__ import main as pack
from tests.pipelines.pack.test_parts import OPTIONS, SOURCE, contents, on_one_machine

SECONDS = 300.0

Run = Callable[..., Any]


def connect() -> None:
    ray.init(address="local", num_cpus=2, log_to_driver=False)


def test_unreachable_cluster_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise ValueError("Invalid address format: nonsense")

    monkeypatch.setitem(
        sys.modules, "ray", SimpleNamespace(init=init, is_initialized=lambda: False)
    )
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    with pytest.raises(DataError, match=r"RAY_ADDRESS='nonsense'\): Invalid address"):
        ray_tasks.run(lambda task, advance: None, [1])


@pytest.fixture(scope="module")
def in_cluster() -> Iterator[Run]:
    """Runs a function of this module in a process of its own, which is connected to a Ray cluster.

    Some errors of Ray abort the process. And when it disconnects, it removes the process's handlers
    of SIGTERM and of crashes: a later test that sends SIGTERM to itself would end the test process.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=connect) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result(SECONDS)
        pool.submit(ray.shutdown).result(SECONDS)


def packed(*arguments: str) -> tuple[int, str]:
    """Runs the command; returns its exit code and its standard error."""
    with contextlib.redirect_stderr(io.StringIO()) as err:
        code = pack(arguments)
    return code, err.getvalue()


def errors_of_failing_tasks(num_runs: int) -> list[str]:
    """Runs four tasks that fail at the same time, several times; returns the errors."""

    def fail(task: int, _: object) -> None:
        raise ValueError(str(task))

    errors = []
    for _ in range(num_runs):
        try:
            ray_tasks.run(fail, range(4))
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_ray_equals_one_machine(in_cluster: Run, tmp_path: Path) -> None:
    source, dest = tmp_path / "text.txt", tmp_path / "packed"
    source.write_text("".join(SOURCE))
    flags = [*OPTIONS[:-2], "--via", "ray"]
    code, message = in_cluster(packed, str(source), str(dest), *flags, "--num-workers", "2")
    assert code == 1
    assert "uses all free cores" in message
    assert in_cluster(packed, str(source), str(dest), *flags)[0] == 0
    assert contents(str(dest)) == on_one_machine(str(source), tmp_path)
    source.write_bytes(b"")  # what a task raises is reported in one line
    code, message = in_cluster(packed, str(source), str(tmp_path / "other"), *flags)
    assert (code, message.count("error:")) == (1, 1)


def error_without_a_file() -> str:
    def fail(task: int, _: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "/data/images")

    with pytest.raises(DataError) as error:
        ray_tasks.run(fail, range(2))
    return str(error.value)


def results_despite_another_address() -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "127.0.0.1:1")
        return ray_tasks.run(lambda task, advance: task + 1, [1, 2])


def test_connected_process_needs_no_address(in_cluster: Run) -> None:
    assert in_cluster(results_despite_another_address) == [2, 3]


def test_file_that_a_machine_does_not_have_is_named(in_cluster: Run) -> None:
    assert in_cluster(error_without_a_file) == (
        "--via ray: /data/images: no such file on a machine of the cluster; all of them need to "
        "reach SRC and DEST"
    )


def test_tasks_that_fail_at_the_same_time_do_not_abort_the_process(in_cluster: Run) -> None:
    errors = in_cluster(errors_of_failing_tasks, 100)
    assert len(errors) == 100
    assert set(errors) <= {"0", "1", "2", "3"}
