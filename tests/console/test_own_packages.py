"""Commands find tfdist's packages even if user files on the path have the same names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.starting import ENVIRON

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
def test_files_of_these_names_where_the_user_works(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('the wrong one')")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],  # like -m, it searches the working folder first
        cwd=tmp_path, env=ENVIRON, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        str(ROOT / "pipelines" / "__init__.py"),
        str(ROOT / "recipes"),
    ], done.stderr


def test_reports_a_conflicting_imported_package(tmp_path: Path) -> None:
    (tmp_path / "pipelines.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", "import pipelines\n" + PROGRAM],
        cwd=tmp_path, env=ENVIRON, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert str(tmp_path / "pipelines.py") in done.stderr
    assert f"needs its package {ROOT / 'pipelines'}. Rename the former" in done.stderr
