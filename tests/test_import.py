"""`import tfdist` does not import TensorFlow, but offers all public names."""

from __future__ import annotations

import pytest

import tfdist
from tests.support.commands import help_without_tensorflow, packages_that_run
from tests.support.starting import python


@pytest.mark.parametrize(
    "module", ["tfdist", "tfdist.train", "tfdist.launch", "tfdist.cluster", "tfdist.strategies"]
)
def test_import_does_not_import_tensorflow(module: str) -> None:
    code = f"import sys, {module}; sys.exit(bool({{'tensorflow', 'keras'}} & set(sys.modules)))"
    python("-c", code)


def test_help_does_not_import_tensorflow() -> None:
    commands = ["tfdist.train", "tfdist.launch", "tfdist.tools.init", *packages_that_run("tfdist")]
    shown = help_without_tensorflow(*commands)
    assert len(commands) == 13
    assert all(f"python -m {command}" in shown for command in commands)
    assert "--num-workers N" in shown
    assert "--strategy one_device|mirrored" in shown


@pytest.mark.parametrize("name", tfdist.__all__)
def test_public_name_exists(name: str) -> None:
    assert getattr(tfdist, name) is not None


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trainer_of_dogs'"):
        tfdist.trainer_of_dogs  # noqa: B018
