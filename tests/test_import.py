"""Importing is fast, and the canary finds the private names that are imported."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import tfdist
from tests.studies import canary
from tests.support import ROOT
from tests.support.commands import help_without_tensorflow, packages_that_run
from tests.support.starting import python
from tfdist.__main__ import COMMANDS


@pytest.mark.parametrize(
    "module", ["tfdist", "tfdist.train", "tfdist.launch", "tfdist.cluster", "tfdist.strategies"]
)
def test_import_does_not_import_tensorflow(module: str) -> None:
    code = f"import sys, {module}; sys.exit(bool({{'tensorflow', 'keras'}} & set(sys.modules)))"
    python("-c", code)


def test_help_does_not_import_tensorflow() -> None:
    commands = [module for module, _ in COMMANDS.values()]
    shown = help_without_tensorflow(*commands, *packages_that_run("tfdist"))
    assert all(re.search(rf"usage: \S*( -m )?tfdist[ .]{name}\b", shown) for name in COMMANDS)
    assert "--num-workers N" in shown
    assert "--strategy one_device|mirrored" in shown


#: What versions of Keras after the oldest supported one have brought.
NEWER_THAN_OLDEST = (
    "keras.RematScope", "keras.remat", "keras.callbacks.OrbaxCheckpoint",
    "keras.layers.ReversibleEmbedding", "keras.layers.RMSNormalization", "keras.optimizers.Muon",
    "keras.optimizers.MultiOptimizer", "keras.optimizers.ScheduleFreeAdamW",
)  # fmt: skip
IMPORTS_AND_TRAINS = """
import importlib, os, pkgutil, sys
import keras
for name in {newer!r}:
    module, _, attribute = name.rpartition(".")
    delattr(sys.modules[module], attribute)
import pipelines, recipes, tfdist, tfdist.train
assert not hasattr(os, "sched_getaffinity")
for package in (pipelines, tfdist, recipes):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
sys.exit(tfdist.train.main(["--smoke", "--strategy", "mirrored"]))
"""


def test_imports_and_trains_without_what_is_only_on_linux_or_new(tmp_path: Path) -> None:
    """As on macOS and with the oldest Keras; the nightly workflow runs `make quick` on both."""
    environ = os.environ | {"PYTHONPATH": f"{ROOT / 'tests/support/without_linux'}:{ROOT}"}
    code = IMPORTS_AND_TRAINS.format(newer=NEWER_THAN_OLDEST)
    done = python("-c", code, cwd=tmp_path, env=environ)
    assert "val_accuracy" in done.stdout


@pytest.mark.parametrize("name", tfdist.__all__)
def test_public_name_exists(name: str) -> None:
    assert getattr(tfdist, name) is not None


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trainer_of_dogs'"):
        tfdist.trainer_of_dogs  # noqa: B018


OLD = {
    "keras/layer.py": "class Layer:\n def _call(self, x): self._seen = x\n def _gone(self): ...",
    "keras/src/core.py": "def cast(x): ...",
    "tensorflow/same.py": "def _kept(a, *, b=1): ...",
}
NEW = OLD | {
    "keras/layer.py": "class Layer:\n def _call(self, x, y): ...\ndef f(l): l._seen = 1",
    "keras/src/core.py": "",
}
NAMES = ("_call", "_seen", "_gone", "_kept", "keras.src.core", "keras.src.core.cast")


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_reports_differences_with_their_uses(tmp_path: Path) -> None:
    old, new = write(tmp_path / "old", OLD), write(tmp_path / "new", NEW)
    uses = {name: [f"upstream/{name}.py:1"] for name in NAMES}
    changes = {change.split()[0]: change for change in canary.compare(uses, old, new)}
    assert changes.keys() == {"_call", "_seen", "_gone", "keras.src.core.cast"}
    assert "no keras/layer.py: Layer._call(self, x)" in changes["_call"]
    assert "now keras/layer.py: Layer._call(self, x, y)" in changes["_call"]
    assert "_gone is missing" in changes["_gone"]
    assert "used in upstream/_gone.py:1" in changes["_gone"]


def test_finds_every_private_name_in_installed_packages() -> None:
    uses = canary.uses()
    result = canary.definitions(uses, canary.installed())
    assert len(uses) > 100
    assert not [name for name in uses if not result[name]]
