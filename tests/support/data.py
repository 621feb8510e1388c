"""Small data sets whose rows all differ, so that a lost or repeated row changes the results."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

# Batches of 7 give 7, 7 and 1 rows: per-replica batches of 4 + 3 rows on two replicas, 3 + 2 + 2
# on three, and a last batch in which only one replica has a row.
NUM_ROWS = 15


@dataclasses.dataclass(frozen=True, eq=False)
class Data:
    """Inputs, labels and sample weights: arrays or nested structures of arrays, rows first.

    For the feed "data set", `x` is a function that returns a dataset.
    """

    x: Any
    y: Any = None
    sample_weight: Any = None


def points(num_rows: int = NUM_ROWS, outputs: int = 1, weighted: bool = False) -> Data:
    """Returns rows for regression.

    Args:
        num_rows: Number of rows.
        outputs: Numbers to predict per row.
        weighted: Whether to add sample weights, some of them 0.

    Returns:
        x: float32 [rows, 4], y: float32 [rows, outputs], sample_weight: float32 [rows] or None.
    """
    random = np.random.default_rng(3)
    x = random.normal(size=(num_rows, 4)).astype("float32")
    y = np.sin(2 * x[:, :outputs]) + x[:, 1:2] * x[:, 2:3] + 0.5
    return Data(x, y.astype("float32"), _weights(random, (num_rows,)) if weighted else None)


def classes(num_rows: int = NUM_ROWS, num_classes: int = 3, weighted: bool = False) -> Data:
    """Returns rows for classification.

    Returns:
        x: float32 [rows, 4], y: int32 [rows], sample_weight: float32 [rows] or None.
    """
    random = np.random.default_rng(4)
    x = random.normal(size=(num_rows, 4)).astype("float32")
    y = (np.floor(2 * x[:, 0] + x[:, 1] ** 2) % num_classes).astype("int32")
    return Data(x, y, _weights(random, (num_rows,)) if weighted else None)


def one_hot(data: Data, num_classes: int = 3) -> Data:
    """Returns the same rows with one-hot labels, float32 [rows, num_classes]."""
    return dataclasses.replace(data, y=np.eye(num_classes, dtype="float32")[data.y])


def images(num_rows: int = NUM_ROWS) -> Data:
    """Returns labeled small images: x: float32 [rows, 6, 6, 1], y: int32 [rows]."""
    random = np.random.default_rng(5)
    x = random.normal(size=(num_rows, 6, 6, 1)).astype("float32")
    return Data(x, (x[:, 2:4, 2:4].sum(axis=(1, 2, 3)) > 0).astype("int32"))


def tokens(
    labels: str = "row", weighted: bool = False, empty: tuple[int, ...] = (2, 8, 11)
) -> Data:
    """Returns sequences of 1 to 5 tokens from 1 to 6, padded with 0.

    Args:
        labels: "row" for one number per row, "step" for one number per token, "class" for one of 3
            classes per token, with -1 for padding.
        weighted: Whether to add a sample weight per label, some of them 0.
        empty: Indices of the rows that are all padding.

    Returns:
        x: int32 [rows, 5], y: [rows, 1], [rows, 5, 1] or [rows, 5].
    """
    random = np.random.default_rng(6)
    number = np.arange(NUM_ROWS)[:, None]
    x = random.integers(1, 7, size=(NUM_ROWS, 5)).astype("int32")
    lengths = random.integers(1, 6, size=NUM_ROWS)
    lengths[list(empty)] = 0
    x[np.arange(5) >= lengths[:, None]] = 0
    if labels == "row":
        y = np.sin(x.sum(axis=1, keepdims=True)) + 0.2 * number
    elif labels == "step":
        y = np.sin(x + number)[..., None]
    else:
        y = np.where(x > 0, (x + number) % 3, -1)
    y = y.astype("int32" if labels == "class" else "float32")
    shape = (NUM_ROWS,) if labels == "row" else (NUM_ROWS, 5)
    return Data(x, y, _weights(random, shape) if weighted else None)


def _weights(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Returns weights between 0.2 and 3, a few of them 0."""
    weights = random.uniform(0.2, 3.0, size=shape)
    weights[random.uniform(size=shape) < 0.2] = 0.0
    return weights.astype("float32")
