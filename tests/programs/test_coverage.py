"""A test trains with every layer, loss, metric, optimizer and callback of Keras.

A class that is new in a version of Keras fails here.
"""

from __future__ import annotations

import ast
import inspect
from typing import Any

import keras
import pytest

from tests.support import ROOT

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
