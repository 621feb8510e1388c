"""Everything that Keras has is in a program: a new version's new class shows up here."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import keras
import pytest

from tests.support import ROOT

#: What no program has, with the reason.
LEFT_OUT: dict[Any, dict[str, str]] = {
    keras.layers: {
        "FlaxLayer": "of JAX",
        "InputLayer": "keras.Input makes it",
        "InputSpec": "no layer",
        "JaxLayer": "of JAX",
        "MaxNumBoundingBoxes": "for boxes beside pictures, before they are a batch",
        "TFSMLayer": "cannot be trained",
        "TorchModuleWrapper": "of PyTorch",
        "Wrapper": "abstract",
    },
    keras.losses: {},
    keras.metrics: {},
    keras.optimizers: {"Optimizer": "abstract", "OptimizerMap": "a part of MultiOptimizer"},
    keras.callbacks: {
        "CallbackList": "fit makes it",
        "OrbaxCheckpoint": "needs orbax, which tfdist does not",
    },
}


@pytest.mark.parametrize("module", LEFT_OUT, ids=lambda module: module.__name__)
def test_every_class_is_in_a_program(module: Any) -> None:
    known = _named() | LEFT_OUT[module].keys()
    missing = [names for names in _classes(module) if known.isdisjoint(names)]
    assert not missing


def _classes(module: Any) -> list[list[str]]:
    """The public classes of a module, each with all of its names."""
    names: dict[type, list[str]] = {}
    for name, value in inspect.getmembers(module, inspect.isclass):
        names.setdefault(value, []).append(name)
    return list(names.values())


def _named() -> set[str]:
    """What the programs, and the contract's cases of optimizers, take out of a module by name."""
    files = [*(ROOT / "tests" / "programs").glob("*.py")]
    files += (ROOT / "tests" / "conformance").glob("cases_*.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text("utf-8")))]
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)}
