"""`make release`: builds sdist and wheel, and tests the wheel with the lowest and newest versions.

Both are written to `build/release`. Nothing is uploaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support import ROOT
from tests.support.commands import packages_that_run
from tfdist.__main__ import COMMANDS

_FOLDER = ROOT / "build" / "release"


def main() -> int:
    """Returns 0. Raises `subprocess.CalledProcessError` if a step fails."""
    shutil.rmtree(_FOLDER, ignore_errors=True)
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)  # deleted modules of earlier builds
    _run(sys.executable, "-m", "build", "--outdir", _FOLDER, ROOT)
    sdist, wheel = _FOLDER.glob("*.tar.gz"), _FOLDER.glob("*.whl")
    _run(sys.executable, "-m", "twine", "check", "--strict", *sdist, *wheel)
    for resolution in ("lowest-direct", "highest"):
        with tempfile.TemporaryDirectory() as folder:
            _test_wheel(next(_FOLDER.glob("*.whl")), Path(folder), resolution)
    print("release:", *(path.name for path in sorted(_FOLDER.iterdir())))
    return 0


def _test_wheel(wheel: Path, folder: Path, resolution: str) -> None:
    """Installs a wheel into an empty environment, runs each command with `--help`, and trains."""
    uv = (sys.executable, "-m", "uv")
    python = folder / "venv" / "bin" / "python"
    _run(*uv, "venv", "--quiet", "--python", sys.executable, folder / "venv")
    install = (*uv, "pip", "install", "--quiet", "--python", python, "--resolution", resolution)
    _run(*install, f"{ROOT}[tensorflow]")  # the lowest of what a source requires, not a wheel
    _run(*install, "--no-deps", "--reinstall", wheel)
    work_folder = folder / "run"  # in the checkout, its packages would shadow the installed ones
    work_folder.mkdir()
    for command in COMMANDS:
        _run(python, "-m", "tfdist", command, "--help", cwd=work_folder, quiet=True)
    for command in packages_that_run("pipelines"):
        _run(python, "-m", command, "--help", cwd=work_folder, quiet=True)
    _run(folder / "venv" / "bin" / "tfdist", "train", "--smoke", cwd=work_folder)


def _run(*command: object, cwd: Path = ROOT, quiet: bool = False) -> None:
    print("$", *command, flush=True)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    output = subprocess.DEVNULL if quiet else None
    subprocess.run(list(map(str, command)), cwd=cwd, env=environ, stdout=output, check=True)


if __name__ == "__main__":
    sys.exit(main())
