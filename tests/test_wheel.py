"""The wheel, built and installed without a network, works in an empty folder.

It is built from the files that the Dockerfile copies.
"""

from __future__ import annotations

import json
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


PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]

#: An image of a hosted notebook: packages, and what they require. The others are installed here.
IMAGE = {
    "tensorflow": ("2.19.1", ["keras>=3.5.0", "numpy>=1.26.0,<2.2.0"]),
    "keras": ("3.10.0", ["numpy"]),
    "numpy": ("2.0.2", []),
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for name in COPIED:  # outside of the checkout, because a build leaves folders behind
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pyc*"))
        else:
            shutil.copy(ROOT / name, source)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "-w", "."]
    starting.run(*PIP, "wheel", *options, ".", cwd=source, env=os.environ)
    (built,) = source.glob("tfdist-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the wheel is installed."""
    target = tmp_path_factory.mktemp("target")
    options = ["--no-deps", "--no-index", "--target", str(target)]
    starting.run(*PIP, "install", *options, str(wheel), env=os.environ)
    return target


def test_installing_the_wheel_replaces_nothing(wheel: Path, tmp_path: Path) -> None:
    for name, (version, requirements) in IMAGE.items():
        information = tmp_path / f"{name}-{version}.dist-info"
        information.mkdir()
        lines = [f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {one}" for one in requirements]
        (information / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines]))
        (information / "INSTALLER").write_text("pip")
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}  # before this environment's own
    options = ["--dry-run", "--no-index", "--report", "-"]
    planned = starting.run(*PIP, "install", *options, str(wheel), env=environ, cwd=tmp_path)
    report = json.loads(planned.stdout)
    assert [one["metadata"]["name"] for one in report["install"]] == ["tfdist"]


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


def test_wheel_contains_manuals_types_and_license(installed: Path) -> None:
    for manual in (*ROOT.glob("tfdist/**/README.md"), *ROOT.glob("pipelines/**/README.md")):
        assert (installed / manual.relative_to(ROOT)).read_text() == manual.read_text()
    assert (installed / "tfdist/py.typed").exists()
    (information,) = installed.glob("tfdist-*.dist-info")
    assert "Apache License" in (information / "LICENSE").read_text()
