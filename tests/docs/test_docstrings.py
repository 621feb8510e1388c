"""Every public class and function has an example, and all examples run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.docs.code_blocks import num_to_run
from tests.docs.execution import public, run_docstring
from tests.docs.public_names import names
from tests.support import ROOT
from tests.support.starting import python
from tfdist import cluster

#: Names and pages whose examples need a new process: they start TensorFlow in a special way, start
#: Horovod, or start other processes. By what must be installed, and by what one process can run.
IN_NEW_PROCESS = {
    "start": ("tfdist", ["tfdist.compile_cache.use", "tfdist.devices.limit_memory"]),
    "workers": (
        "tfdist",
        [
            "tfdist.notebook_launch",
            "tfdist.strategies.multi_worker.MultiWorker",
            "tfdist/cluster/launcher/README.md",
        ],
    ),
    "servers": ("tfdist", ["tfdist.strategies.parameter_server.strategy.ParameterServer"]),
    "horovod": (
        "horovod",
        [
            "tfdist.strategies.horovod.Horovod",
            *(name for name in names() if name.startswith("tfdist.horovod.")),
            *("docs/horovod.md", "tfdist/horovod/README.md"),
        ],
    ),
    "ray": (
        "ray",
        [
            *("tfdist.ray.ReportCallback", "tfdist.ray.report", "tfdist.ray.train"),
            *("tfdist.ray.trial_resources", "tfdist/ray/README.md"),
        ],
    ),
}
ELSEWHERE = {name for _, group in IN_NEW_PROCESS.values() for name in group}
#: No example: one subclasses the first, and reads the second from a callback.
WITHOUT = {"tfdist.strategies.Strategy", "tfdist.callbacks.profile.Seconds"}

ALL = sorted(set(names()) - WITHOUT)
HERE = [name for name in ALL if name not in ELSEWHERE]


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


def test_names_are_found() -> None:
    assert len(ALL) > 100
    assert {"tfdist.Trainer.fit", "tfdist.schedules.cosine", "pipelines.read"} < set(ALL)
    assert {name for name in ELSEWHERE if not name.endswith(".md")} < set(ALL)


def test_every_public_name_has_an_example() -> None:
    assert not [name for name in ALL if ">>> " not in (public(name).__doc__ or "")]


@pytest.mark.xdist_group("docstrings")
@pytest.mark.parametrize("name", HERE)
def test_example_runs(name: str, data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data_folder)
    before = cluster.current()
    if name.startswith("pipelines.") and not Path("data/digits").exists():
        run_docstring("pipelines.write_shards")
    try:
        assert run_docstring(name)
    finally:
        cluster.use(before)


@pytest.mark.processes
@pytest.mark.parametrize("group", IN_NEW_PROCESS)
def test_examples_run_in_a_new_process(group: str, tmp_path: Path) -> None:
    needs, examples = IN_NEW_PROCESS[group]
    pytest.importorskip(needs, reason="an extra that is not installed")
    environ = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    module = ("-m", "tests.docs.execution")
    done = python(*module, *examples, cwd=tmp_path, env=environ, timeout=600)
    ran = json.loads(done.stdout.splitlines()[-1])
    for name in examples:
        assert ran[name] == num_to_run(ROOT / name) if name.endswith(".md") else ran[name]
