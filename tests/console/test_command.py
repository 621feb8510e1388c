"""Exit codes of the commands, and the message about a wrong flag."""

from __future__ import annotations

import functools
import weakref
from pathlib import Path
from typing import Any

import pytest
from jsonargparse.typing import PositiveInt

import pipelines
from tests.support import ROOT
from tfdist.console import command, tracebacks
from tfdist.errors import ConfigurationError, DataError
from tfdist.tools.tune import __main__ as tune


def test_exit_code_follows_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    def wrong() -> None:
        raise DataError("Expected 3 rows, got 2: add one.")

    def interrupted() -> None:
        raise KeyboardInterrupt

    assert command.run(lambda: None) == 0
    assert command.run(lambda: 3) == 3
    assert command.run(wrong) == 1
    assert capsys.readouterr().err == "error: Expected 3 rows, got 2: add one.\n"
    assert command.run(interrupted) == 130

    def unreadable() -> None:
        raise pipelines.DataError("s3://: expected a bucket")

    assert command.run(unreadable) == 1
    assert capsys.readouterr().err == "error: s3://: expected a bucket\n"


def test_cycles_are_freed_before_the_interpreter_ends() -> None:
    """Such as an iterator over data whose thread waits for the interpreter."""
    freed: list[int] = []

    class Cycle:
        def __init__(self) -> None:
            self.itself = self
            weakref.finalize(self, freed.append, 1)

    def interrupted() -> None:
        Cycle()
        raise KeyboardInterrupt

    assert command.run(interrupted) == 130
    assert freed


def test_error_of_a_callback_shows_the_frames_of_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "recipe.py"
    script.write_text("def on_epoch_end(logs):\n    logs['nothing']\n")
    code: dict[str, Any] = {}
    exec(compile(script.read_text(), str(script), "exec"), code)

    def main() -> None:
        # The standard library stands for the frameworks between command and callback.
        functools.reduce(lambda logs, _: code["on_epoch_end"](logs), [1], {})

    monkeypatch.setattr(tracebacks, "_FRAMEWORKS", (*tracebacks._FRAMEWORKS, str(ROOT / "tests")))
    assert command.run(main) == 1
    first, *rest = capsys.readouterr().err.splitlines()
    assert "framework frames are hidden; set TFDIST_FULL_TRACEBACK=1 to show them" in first
    assert rest[0] == "Traceback (most recent call last):"
    assert rest[1].split(",")[0] == f'  File "{script}"'
    assert rest[-1] == "KeyError: 'nothing'"
    monkeypatch.setenv(tracebacks.FULL, "1")
    with pytest.raises(KeyError):
        command.run(main)


def even(word: str) -> int:
    return int(word) * 2


def test_help_says_only_what_users_understand() -> None:
    parser = command.parser("python -m tfdist.thing", "Does a thing.")
    parser.add_argument("names", nargs="*", help="names; default: all")
    parser.add_argument("--half", type=even, help="half of it (of the whole)")
    parser.add_argument("--name", type=str, help="a name")
    parser.add_argument("--number", type=PositiveInt, default=4, help="a number")
    parser.add_argument("--on", action="store_true", help="a switch")
    parser.add_argument("--some", nargs="+", default=["a", "b"], help="some")
    shown = parser.format_help()
    assert "names; default: all\n" in shown
    assert "half of it (of the whole)\n" in shown
    assert "a name\n" in shown
    assert "a number (default: 4)\n" in shown
    assert "a switch\n" in shown
    assert "some (default: a, b)\n" in shown


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["search"], "the following arguments are required: --over\n"),
        (
            ["search", "--over", "a=1", "--trials", "0"],
            "--trials: expected a number above 0, got 0",
        ),
        (["search", "--over", "a=1", "--seed", "x"], "--seed: expected an integer, got 'x'"),
        ([], "a subcommand is missing: expected one of batch-size, lr, search\n"),
        (["serch"], "expected one of batch-size, lr, search, got 'serch'. Did you mean search?"),
        (
            ["search", "--over", "a=1", "--sampler", "TPE"],
            "--sampler: expected one of tpe, random, grid, got 'TPE'. Did you mean tpe?",
        ),
        (["batch-size", "--from", "9", "--most", "8"], "--most must be at least --from"),
        (["search", "--ovr", "a=1"], "Did you mean --over?\ntfdist tune search --help"),
    ],
)
def test_error_of_a_subcommand_names_its_flags(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune.main(words) == 1
    assert problem in capsys.readouterr().err


def test_wrong_flag_mentions_help() -> None:
    parser = command.parser("python -m tfdist.thing", "Does a thing.")
    with pytest.raises(ConfigurationError, match=r"--wrong\npython -m tfdist\.thing --help lists"):
        command.parse(parser, ["--wrong"])
