"""The manner of the commands: help at once, one-line errors, exit codes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pipelines import DataError
from pipelines.console import command_line
from tests.support import ROOT

#: Every package that `python -m` runs.
COMMANDS = sorted(path.parent.name for path in (ROOT / "pipelines").glob("*/__main__.py"))
#: All in one process: what the first imports, the others find imported.
HELP = """
import runpy, sys
for command in sys.argv[1:]:
    sys.argv[1:] = ["--help"]
    try:
        runpy.run_module(f"pipelines.{command}", run_name="__main__")
    except SystemExit as end:
        assert not end.code
    assert not {"tensorflow", "keras"} & set(sys.modules), command
"""


def test_help_needs_no_tensorflow() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", HELP, *COMMANDS],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown = [f"python -m pipelines.{command}" in done.stdout for command in COMMANDS]
    assert len(shown) == 6
    assert all(shown)


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
    assert "python -m pipelines.test --help lists what there is." in errors
