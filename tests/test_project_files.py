"""Files of the project, and the README's example."""

from __future__ import annotations

import ast
import configparser
import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import tfdist
from tests import selection
from tests.studies import versions
from tests.support import ROOT
from tests.support.starting import run
from tfdist.run import flags


def test_pre_commit_runs_the_commands_of_make_lint() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook["entry"] for repo in config["repos"] for hook in repo["hooks"]]
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    assert hooks == recipe[1].replace("\t$(BIN)", ".venv/bin").splitlines()


def test_workflows_run_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    workflows = [path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    run = {target for text in workflows for target in re.findall(r"run: make ([\w-]+)", text)}
    assert {"quick", "test", "coverage"} <= run <= targets


def test_versions_page_has_every_cell_of_the_study() -> None:
    rows = re.findall(r"^\| (3\..*) \|$", versions.PAGE.read_text(), re.MULTILINE)
    cells = [tuple(cell.strip() for cell in row.split("|")) for row in rows]
    assert [row[:4] for row in cells] == [one[:4] for one in versions.COMBINATIONS]
    assert all(len(row) == 4 + len(versions.COLUMNS) and all(row) for row in cells)


def test_versions_study_replaces_one_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, before = tmp_path / "versions.md", versions.PAGE.read_text()
    page.write_text(before)
    monkeypatch.setattr(versions, "PAGE", page)
    versions.write_cell(versions.COMBINATIONS[-1], versions.COLUMNS[-1], "9 exact")
    changed = [line for line in page.read_text().splitlines() if line not in before.splitlines()]
    assert [line.rpartition(" | ")[2] for line in changed] == ["9 exact |"]


def test_versions_study_installs_again_what_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, commands = subprocess.CompletedProcess([], 0, "", ""), []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command) or done)
    python = tmp_path / versions.COMBINATIONS[0].name / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert versions.environment(versions.COMBINATIONS[0], tmp_path) == python
    assert [command[:3] for command in commands] == [[sys.executable, "-m", "uv"]] * 5


def test_citation_matches_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == tfdist.__version__


@pytest.mark.parametrize("place", sorted(selection.REGISTERS))
def test_selection_names_tests_that_exist(place: str) -> None:
    path, _, function = place.partition("::")
    assert (ROOT / path).exists()
    name = function.partition("[")[0]
    assert not name or f"def {name}(" in (ROOT / path).read_text()


README = (ROOT / "README.md").read_text()
EXAMPLE = ROOT / "docs/example.py"


def test_readme_shows_the_example_script() -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert shown == EXAMPLE.read_text()


def test_example_prints_the_metrics_in_the_readme(tmp_path: Path) -> None:
    done = run(sys.executable, str(EXAMPLE), "mirrored", cwd=tmp_path)
    shown = re.search(r"`(accuracy: [\d.]+ - loss: [\d.]+)`", README)
    assert shown
    assert done.stdout.splitlines()[-1].endswith(shown[1])
    assert (tmp_path / "model.keras").exists()


def test_commands_begin_after_all_their_functions_are_defined() -> None:
    for package in ("tfdist", "pipelines", "recipes", "benchmarks"):
        for path in (ROOT / package).rglob("*.py"):
            begins = [ast.unparse(n) for n in ast.parse(path.read_text()).body[:-1]]
            assert not [code for code in begins if code.startswith("if __name__")], path


# ---- the Dockerfile ----


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
