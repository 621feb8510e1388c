"""Common behavior of the commands: quick help, one-line errors, exit codes, cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipelines import DataError, cores
from pipelines.check import main as check
from pipelines.console import command_line
from tests.support.commands import help_without_tensorflow, packages_that_run


def test_help_needs_no_tensorflow() -> None:
    commands = packages_that_run("pipelines")
    shown = help_without_tensorflow(*commands)
    assert len(commands) == 6
    assert all(f"python -m {command}" in shown for command in commands)


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (DataError("what and why"), "error: what and why", 1),
        (PermissionError(13, "Permission denied", "/data"), "error: /data: Permission denied", 1),
        (OSError("no words"), "error: no words", 1),
        (KeyboardInterrupt(), "", 130),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], error: BaseException, line: str, code: int
) -> None:
    def command() -> None:
        raise error

    assert command_line.run(command_line.parser("test", "Tests."), command, []) == code
    assert capsys.readouterr().err.strip() == line


def test_unknown_flags_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    parser = command_line.parser("test", "Tests.")
    assert command_line.run(parser, lambda: None, ["--wrong"]) == 1
    errors = capsys.readouterr().err
    assert "--wrong" in errors
    assert "python -m pipelines.test --help lists the flags." in errors


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--batch-size", "0"], "error: --batch-size: expected a number above 0, got 0\n"),
        (["--batch-size", "x"], "error: --batch-size: expected an integer, got 'x'\n"),
        (["--shuffle-buffer", "-1"], "error: --shuffle-buffer: expected a number from 0, got -1\n"),
    ],
)
def test_invalid_number(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(["data", *words]) == 1
    assert problem in capsys.readouterr().err


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
