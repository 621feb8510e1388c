"""`make release`: builds the sdist and the wheel, and tries the wheel in a fresh environment.

Both are left in `build/release`. Nothing is uploaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from tests.support import ROOT
from tests.support.commands import packages_that_run
from tfdist.__main__ import COMMANDS

_FOLDER = ROOT / "build" / "release"


def main() -> int:
    """Returns 0; a step that fails raises `subprocess.CalledProcessError`."""
    shutil.rmtree(_FOLDER, ignore_errors=True)
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)  # deleted modules of earlier builds
    _run(sys.executable, "-m", "build", "--outdir", _FOLDER, ROOT)
    sdist, wheel = _FOLDER.glob("*.tar.gz"), _FOLDER.glob("*.whl")
    _run(sys.executable, "-m", "twine", "check", "--strict", *sdist, *wheel)
    with tempfile.TemporaryDirectory() as folder:
        _try(next(_FOLDER.glob("*.whl")), Path(folder))
    print("release:", *(path.name for path in sorted(_FOLDER.iterdir())))
    return 0


def _try(wheel: Path, folder: Path) -> None:
    """Installs a wheel into an empty environment, asks every command for help, and trains."""
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    _run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
    elsewhere = folder / "run"  # the checkout would shadow what is installed
    elsewhere.mkdir()
    for command in COMMANDS:
        _run(python, "-m", "tfdist", command, "--help", cwd=elsewhere, quiet=True)
    for command in packages_that_run("pipelines"):
        _run(python, "-m", command, "--help", cwd=elsewhere, quiet=True)
    _run(folder / "venv" / "bin" / "tfdist", "train", "--smoke", cwd=elsewhere)


def _run(*command: object, cwd: Path = ROOT, quiet: bool = False) -> None:
    print("$", *command, flush=True)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    output = subprocess.DEVNULL if quiet else None
    subprocess.run(list(map(str, command)), cwd=cwd, env=environ, stdout=output, check=True)


if __name__ == "__main__":
    sys.exit(main())
