"""`import tfdist` does not import TensorFlow, but offers all public names."""

from __future__ import annotations

import re

import pytest

import tfdist
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


@pytest.mark.parametrize("name", tfdist.__all__)
def test_public_name_exists(name: str) -> None:
    assert getattr(tfdist, name) is not None


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trainer_of_dogs'"):
        tfdist.trainer_of_dogs  # noqa: B018
