"""Rows for programs: 11 in batches of 5, with uneven and empty per-replica batches."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.data import Data

NUM_ROWS = 11


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Returns float64 [NUM_ROWS, *shape]."""
    return np.random.default_rng(seed).normal(size=(NUM_ROWS, *shape))


def integers(high: int, *shape: int, low: int = 0, seed: int = 1) -> np.ndarray:
    """Returns int32 [NUM_ROWS, *shape], from `low` up to below `high`."""
    random = np.random.default_rng(seed)
    return random.integers(low, high, size=(NUM_ROWS, *shape)).astype("int32")


def pictures(size: int = 8, channels: int = 1, classes: int = 3) -> Data:
    """Returns x: [rows, size, size, channels], y: int32 [rows]."""
    return Data(normal(size, size, channels), integers(classes))


def sequences(steps: int = 6, features: int = 2, outputs: int = 1) -> Data:
    """Returns x: [rows, steps, features], y: [rows, outputs]."""
    return Data(normal(steps, features), normal(outputs, seed=2))


def sentences(length: int = 6, words: int = 9, classes: int = 2) -> Data:
    """Returns x: int32 [rows, length], padded with 0, y: int32 [rows]."""
    x = integers(words, length, low=1)
    x[np.arange(length) >= 1 + integers(length, seed=3)[:, None]] = 0
    return Data(x, integers(classes, seed=4))


def vectors(features: int = 4, outputs: int = 1) -> Data:
    """Returns x: [rows, features], y: [rows, outputs]."""
    return Data(normal(features), normal(outputs, seed=2))


def named(y: Any = None, **inputs: np.ndarray) -> Data:
    """Returns inputs by name, with a number to predict from each row."""
    return Data(inputs, normal(1, seed=2) if y is None else y)
