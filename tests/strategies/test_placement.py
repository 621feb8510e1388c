"""Variables and gradient sums must not be views of larger tensors."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import create_autospec

import numpy as np
import pytest
import tensorflow as tf

from tfdist.strategies.sharded.division import OverDevices, OverProcesses
from tfdist.strategies.sharded.rank0_coordinator import Rank0Coordinator
from tfdist.strategies.tensor_parallel.splits import AlongAxis
from tfdist.upstream.keras_variables import Division


def over_processes(rank: int) -> Division:
    coordinator = create_autospec(Rank0Coordinator, instance=True)
    coordinator.group = SimpleNamespace(rank=rank, size=2)
    return OverProcesses(256, coordinator, list)


@pytest.mark.parametrize(
    ("division", "shape"),
    [
        (OverDevices(2), (128,)),
        (over_processes(0), (128,)),
        (over_processes(1), (128,)),
        (AlongAxis(0, [8, 8]), (8, 16)),
        (AlongAxis(1, [8, 8]), (16, 8)),
    ],
)
def test_slice_does_not_keep_the_tensor_in_memory(
    division: Division, shape: tuple[int, ...]
) -> None:
    """A view would, in a variable that it is assigned to or in a sum that reuses its buffer."""
    whole = tf.reshape(tf.range(256.0), [16, 16])  # its halves are aligned in memory
    parts = division.cut(whole)
    assert {tuple(part.shape) for part in parts} == {shape}
    assert not any(np.shares_memory(*map(np.from_dlpack, (whole, part))) for part in parts)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_slices_match_tensorflow(axis: int) -> None:
    whole = tf.reshape(tf.range(64.0), [4, 4, 4])
    expected = tf.split(whole, [1, 3], axis)
    for part, own in zip(AlongAxis(axis, [1, 3]).cut(whole), expected, strict=True):
        np.testing.assert_array_equal(part, own)
