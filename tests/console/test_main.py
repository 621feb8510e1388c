"""`python -m tfdist` lists and runs commands, also beside files of the user with our names."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

import tfdist
from tests.support import ROOT
from tests.support.starting import run
from tfdist import __main__ as tfdist_command


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
