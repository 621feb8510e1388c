"""The wheel, built and installed without a network, works in an empty folder.

It is built from the files that the Dockerfile copies.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.support import ROOT, starting

#: Sources of the COPY lines in the Dockerfile.
COPIED = [
    source
    for words in re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    for source in words.split()
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the wheel is installed."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    for name in COPIED:  # outside of the checkout, because a build leaves folders behind
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pyc*"))
        else:
            shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", ".", "."]
    starting.run(*pip, *wheel, cwd=source, env=os.environ)
    (built,) = source.glob("tfdist-*.whl")
    install = ["install", "--no-deps", "--no-index", "--target", str(target), str(built)]
    starting.run(*pip, *install, env=os.environ)
    return target


def test_commands_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    environ = os.environ | {"PYTHONPATH": str(installed)}
    script = str(installed / "bin" / "tfdist")

    def output(*arguments: str) -> str:
        return starting.run(sys.executable, *arguments, cwd=tmp_path, env=environ).stdout

    path = output("-c", "import tfdist.__main__; print(tfdist.__file__)")
    assert path.startswith(str(installed))
    assert output(script, "--version").startswith("tfdist ")
    assert "--strategy" in output(script, "train", "--help")
    listed = output(script)
    assert all(name in listed for name in ("train", "launch", "verify", "doctor", "bench"))
    assert output(script, "launch", "--dry-run").count("--strategy multi_worker") == 2


def test_wheel_contains_manuals_and_license(installed: Path) -> None:
    for manual in (*ROOT.glob("tfdist/**/README.md"), *ROOT.glob("pipelines/**/README.md")):
        assert (installed / manual.relative_to(ROOT)).read_text() == manual.read_text()
    (information,) = installed.glob("tfdist-*.dist-info")
    assert "Apache License" in (information / "LICENSE").read_text()
