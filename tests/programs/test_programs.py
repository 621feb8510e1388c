"""Programs and random models give the same results in a Trainer as in plain Keras on one device."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import keras
import pytest

from tests.conformance import results
from tests.programs import engines
from tests.programs.programs import PROGRAMS
from tests.studies.random_programs import differences_of, draw_recipe
from tests.support import ROOT
from tfdist.errors import TfdistError

# `make check` runs the quick ones, `make conformance` all.
PARAMETERS = [
    pytest.param(name, marks=[] if program.quick else [pytest.mark.long])
    for name, program in PROGRAMS.items()
]
#: Classes without a test, with the reason.
LEFT_OUT: dict[Any, dict[str, str]] = {
    keras.layers: {
        "FlaxLayer": "needs JAX",
        "InputLayer": "created by keras.Input",
        "InputSpec": "not a layer",
        "JaxLayer": "needs JAX",
        "MaxNumBoundingBoxes": "preprocesses bounding boxes before batching",
        "TFSMLayer": "cannot be trained",
        "TorchModuleWrapper": "needs PyTorch",
        "Wrapper": "abstract",
    },
    keras.losses: {},
    keras.metrics: {},
    keras.optimizers: {"Optimizer": "abstract", "OptimizerMap": "part of MultiOptimizer"},
    keras.callbacks: {
        "CallbackList": "created by fit",
        "OrbaxCheckpoint": "needs orbax, which is not installed",
    },
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_program_equals_one_device(name: str) -> None:
    """Weights, optimizer, history, evaluation and predictions, or a refusal."""
    program = PROGRAMS[name]
    try:
        result = engines.tfdist(program, "mirrored", 2)
    except TfdistError:
        if not program.may_refuse:
            raise
        return
    differences = results.compare(result, engines.reference(name), program)
    assert not differences, "\n".join(map(str, differences))


@pytest.mark.parametrize(
    "number", [*range(10), *(pytest.param(n, marks=pytest.mark.long) for n in range(10, 40))]
)
def test_random_model_equals_one_device(number: int) -> None:
    """`python -m tests.studies.random_programs` tries a thousand."""
    recipe = draw_recipe(0, number)
    assert not differences_of(recipe), recipe


@pytest.mark.parametrize("module", LEFT_OUT, ids=lambda module: module.__name__)
def test_every_class_is_tested(module: Any) -> None:
    known = _named() | LEFT_OUT[module].keys()
    missing = [names for names in _classes(module) if known.isdisjoint(names)]
    assert not missing


def _classes(module: Any) -> list[list[str]]:
    """Returns the public classes of a module, each with all of its names."""
    names: dict[type, list[str]] = {}
    for name, value in inspect.getmembers(module, inspect.isclass):
        names.setdefault(value, []).append(name)
    return list(names.values())


def _named() -> set[str]:
    """Returns the attributes that programs, conformance cases and tests of callbacks use."""
    files = [*(ROOT / "tests" / "programs").glob("*.py")]
    files += (ROOT / "tests" / "conformance").glob("cases_*.py")
    files += (ROOT / "tests" / "trainer").glob("test_*.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text("utf-8")))]
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)}
