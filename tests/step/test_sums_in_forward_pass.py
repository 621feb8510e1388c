"""Tracing with all-reduces in the forward pass, as for synchronized BatchNorm."""

from __future__ import annotations

from typing import Any

import pytest
from keras import layers
from tensorflow.python.ops import op_selector

from tests.step.test_control_edges import traced_step


def num_ops_visited(monkeypatch: pytest.MonkeyPatch, depth: int) -> int:
    """Traces a step, and returns how many ops TensorFlow visits while it searches for variables."""
    original, visited = op_selector.get_backward_walk_ops, []

    def counting(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        visited.extend(result)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(op_selector, "get_backward_walk_ops", counting)
        traced_step("mirrored", 2, depth, lambda: layers.BatchNormalization(synchronized=True))
    assert visited
    return len(visited)


def test_all_reduce_does_not_search_the_layers_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shallow, deep = (num_ops_visited(monkeypatch, depth) for depth in (2, 6))
    assert deep < 3.5 * shallow
