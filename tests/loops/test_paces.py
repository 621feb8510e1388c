"""A pass over the same data begins at the pace of the last one, and none over others does."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tests.support.training import X
from tfdist.loops.feed import Feed
from tfdist.loops.paces import Paces
from tfdist.strategies.base import Strategy


def test_the_same_data_are_known_again() -> None:
    paces, strategy = Paces(), Strategy()
    dataset = tf.data.Dataset.from_tensor_slices(X).batch(2)
    paces.note("test", Feed(strategy, dataset), 7)
    paces.note("test", Feed(strategy, X, batch_size=2), 8)
    assert paces.known("test", Feed(strategy, dataset)) == 7
    assert paces.known("test", Feed(strategy, np.zeros_like(X), batch_size=2)) == 8
    assert not paces.known("predict", Feed(strategy, dataset))
    assert not paces.known("test", Feed(strategy, dataset.take(2)))
    assert not paces.known("test", Feed(strategy, X, batch_size=3))
    assert not paces.known("test", Feed(strategy, ((row[None],) for row in X)))
