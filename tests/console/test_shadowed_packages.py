"""Commands find tfdist's packages even if user files on the path have the same names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.starting import run

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
