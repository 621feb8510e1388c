"""`limit_steps` and `overfit_batches`."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist.config import TrainConfig
from tfdist.errors import DataError
from tfdist.run.datasets import limited

#: Five batches, the last one partial, in a new order on each pass.
DATA = tf.data.Dataset.range(18).shuffle(18, seed=1).batch(4)
VALIDATION = tf.data.Dataset.range(40).batch(4)


def rows(data: tf.data.Dataset) -> list[list[int]]:
    return [batch.tolist() for batch in data.as_numpy_iterator()]


def test_all_batches_by_default() -> None:
    assert limited(TrainConfig(), DATA, None) == (DATA, None)


def test_limit_steps_takes_the_first_batches_of_each_pass() -> None:
    data, validation = limited(TrainConfig(limit_steps=2), DATA, VALIDATION)
    assert int(data.cardinality()) == 2
    first, second = rows(data), rows(data)
    assert first != second  # reshuffled
    assert rows(validation) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert limited(TrainConfig(limit_steps=9), DATA, None)[1] is None
    assert int(limited(TrainConfig(limit_steps=9), DATA, None)[0].cardinality()) == 5


def test_overfit_batches_are_the_same_in_training_and_validation() -> None:
    data, validation = limited(TrainConfig(overfit_batches=5), DATA, VALIDATION)
    assert data is validation
    first = rows(data)
    assert sorted(np.concatenate(first)) == list(range(18))
    assert [len(batch) for batch in first] == [4, 4, 4, 4, 2]
    assert rows(data.take(2)) == first[:2]
    assert rows(data) == first
    assert int(data.cardinality()) == 5


def test_too_few_batches_to_overfit_raise() -> None:
    with pytest.raises(DataError, match=r"overfit_batches=6: .* got 5: choose a smaller"):
        limited(TrainConfig(overfit_batches=6), DATA, None)
