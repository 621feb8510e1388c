"""`python -m tfdist` lists and runs commands, also beside files of the user with our names."""

from __future__ import annotations

import functools
import importlib.util
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jsonargparse.typing import PositiveInt

import pipelines
import tfdist
from tests.support import ROOT
from tests.support.starting import run
from tfdist import __main__ as tfdist_command
from tfdist.console import command, tracebacks
from tfdist.errors import ConfigurationError, DataError
from tfdist.tools.tune import __main__ as tune


@pytest.mark.parametrize("name", tfdist_command.COMMANDS)
def test_command_gets_its_arguments_and_returns_its_exit_code(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tfdist_command.COMMANDS[name][0]
    assert importlib.util.find_spec(module) is not None
    given: list[tuple[str, Sequence[str]]] = []

    def imported(found: str) -> SimpleNamespace:
        return SimpleNamespace(main=lambda arguments: given.append((found, arguments)) or 7)  # type: ignore[func-returns-value]

    monkeypatch.setattr(tfdist_command.importlib, "import_module", imported)
    assert tfdist_command.main([name, "--flag", "value"]) == 7
    assert given == [(module, ["--flag", "value"])]


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_all_commands(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert tfdist_command.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [line.split()[0] for line in lines if line.startswith("  ")]
    assert listed == list(tfdist_command.COMMANDS)


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert tfdist_command.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tfdist {tfdist.__version__}\n"


def test_unknown_command_raises(capsys: pytest.CaptureFixture[str]) -> None:
    assert tfdist_command.main(["trian"]) == 1
    assert "error: 'trian' is not a command: expected one of train, " in capsys.readouterr().err


def test_completion_without_its_package_runs_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    monkeypatch.setattr(tfdist_command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        tfdist_command.main(["train"])


def test_flags_are_completed_by_their_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tfdist_command.importlib.util, "find_spec", lambda name: name)
    for name, value in {
        "_ARGCOMPLETE": "1",
        "COMP_LINE": "tfdist runs --f",
        "COMP_POINT": "15",
    }.items():
        monkeypatch.setenv(name, value)
    assert tfdist_command._complete() == ["runs"]
    assert tfdist_command.os.environ["_ARGCOMPLETE"] == "2"


#: A command without TensorFlow that imports both.
PROGRAM = """
from tfdist.console import command
def main():
    import pipelines, recipes
    print(pipelines.__file__)
    print(recipes.__path__[0])
raise SystemExit(command.run(main))
"""


@pytest.mark.parametrize("names", [("pipelines.py", "recipes/__init__.py"), ("recipes/data.txt",)])
def test_user_files_of_the_same_names_are_ignored(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('the wrong one')")
    # Like -m, -c puts the working folder first on the path.
    done = run(sys.executable, "-c", PROGRAM, cwd=tmp_path)
    expected = [str(ROOT / "pipelines" / "__init__.py"), str(ROOT / "recipes")]
    assert done.stdout.splitlines() == expected


def test_reports_a_conflicting_imported_package(tmp_path: Path) -> None:
    (tmp_path / "pipelines.py").write_text("")
    done = run(sys.executable, "-c", "import pipelines\n" + PROGRAM, cwd=tmp_path, code=1)
    assert str(tmp_path / "pipelines.py") in done.stderr
    assert f"needs its own package {ROOT / 'pipelines'}. Rename your module" in done.stderr


# ---- commands ----


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
