"""A pass over the same data starts with the last number of steps per call; others do not."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tests.support.training import X
from tfdist.loops.data_handler import DataHandler
from tfdist.loops.steps_per_call import StepsPerCallCache
from tfdist.strategies.one_device import OneDevice


def test_recognizes_the_same_data() -> None:
    cache, strategy = StepsPerCallCache(), OneDevice()
    dataset = tf.data.Dataset.from_tensor_slices(X).batch(2)
    cache.note("test", DataHandler(strategy, dataset), 7)
    cache.note("test", DataHandler(strategy, X, batch_size=2), 8)
    assert cache.known("test", DataHandler(strategy, dataset)) == 7
    assert cache.known("test", DataHandler(strategy, np.zeros_like(X), batch_size=2)) == 8
    assert not cache.known("predict", DataHandler(strategy, dataset))
    assert not cache.known("test", DataHandler(strategy, dataset.take(2)))
    assert not cache.known("test", DataHandler(strategy, X, batch_size=3))
    assert not cache.known("test", DataHandler(strategy, ((row[None],) for row in X)))
