"""The Dockerfile installs tfdist by the steps of the installation page.

`tests/test_wheel.py` builds the wheel from the files that the Dockerfile copies.
"""

from __future__ import annotations

import configparser
import itertools
import re
import shlex

import pytest

from tests.support import ROOT
from tfdist.run import flags

TEXT = (ROOT / "Dockerfile").read_text()
STEPS = TEXT.replace("\\\n", "")
PAGE = (ROOT / "docs" / "installation.md").read_text()
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")

#: The commands in the Dockerfile's header that begin with these words.
BUILDS = re.findall(r"^#   (docker build .*)", TEXT, re.MULTILINE)
RUNS = re.findall(r"^#   docker run .*?tfdist\S* (.+)", TEXT, re.MULTILINE)


def test_steps_are_those_of_the_installation_page() -> None:
    (install,) = re.findall(r'pip install --no-cache-dir "(.*?)"', STEPS)
    assert install == ".[tensorflow${EXTRAS:+,$EXTRAS}]"
    assert "pip install '.[tensorflow]'" in PAGE
    assert "pip install '.[gpu]'" in PAGE
    assert 'if [ -n "$HOROVOD" ]; then tfdist install_horovod' in STEPS
    assert "tfdist install_horovod" in PAGE


@pytest.mark.parametrize("build", BUILDS)
def test_builds_are_on_the_installation_page_and_their_arguments_exist(build: str) -> None:
    assert build in PAGE
    words = shlex.split(build)
    given = dict(
        value.split("=") for flag, value in itertools.pairwise(words)
        if flag == "--build-arg"
    )  # fmt: skip
    assert set(given) <= set(re.findall(r"^ARG (\w+)", TEXT, re.MULTILINE))
    extras = [one for one in given.get("EXTRAS", "").split(",") if one]
    assert set(extras) <= set(SETUP["options.extras_require"])


def test_python_is_one_that_is_supported() -> None:
    (version,) = re.findall(r"^ARG PYTHON=(.+)$", TEXT, re.MULTILINE)
    assert SETUP["options"]["python_requires"] == f">={version}"


@pytest.mark.parametrize("arguments", RUNS)
def test_runs_are_valid_commands(arguments: str) -> None:
    name, *rest = shlex.split(arguments)
    assert name == "train"
    assert flags.parse("", "", rest).recipe == "digits"


def test_entry_point_is_a_console_script() -> None:
    (entry,) = re.findall(r'^ENTRYPOINT \["(.+)"\]$', TEXT, re.MULTILINE)
    assert f"{entry} = " in SETUP["options.entry_points"]["console_scripts"]
    assert BUILDS
    assert RUNS


def test_image_has_what_an_mpi_job_starts() -> None:
    from tfdist.cluster.launcher import manifests
    from tfdist.cluster.launcher.options import parse

    job = manifests.kubernetes(parse(["--print-k8s", "mpijob", "--", "true"]))
    assert "/usr/sbin/sshd" in job
    assert "${HOROVOD:+openssh-server " in STEPS
