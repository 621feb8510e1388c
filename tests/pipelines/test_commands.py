"""Common behavior of the commands: quick help, one-line errors, exit codes."""

from __future__ import annotations

import pytest

from pipelines import DataError
from pipelines.check.__main__ import main as check
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
