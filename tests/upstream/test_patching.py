"""Attributes are replaced within a block, and blocks of several threads must not cross."""

from __future__ import annotations

import types

import pytest

from tfdist.upstream.patching import replaced


def test_attributes_are_restored_in_nested_blocks() -> None:
    owner = types.SimpleNamespace(a=1)
    with replaced(owner, "a", 2), replaced(owner, "a", 3), replaced(owner, "b", 4):
        assert (owner.a, owner.b) == (3, 4)
    assert vars(owner) == {"a": 1}


def test_blocks_that_cross_are_refused() -> None:
    owner = types.SimpleNamespace(a=1)
    outer, inner = replaced(owner, "a", 2), replaced(owner, "a", 3)
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match="replaced by another thread"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    assert owner.a == 2
