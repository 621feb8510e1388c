"""What is known about a data set."""

from __future__ import annotations

import pytest
import tensorflow as tf

import pipelines
from tfdist.upstream.input_data import is_prefetched

NUMBERS = tf.data.Dataset.range(4)


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (NUMBERS, False),
        (NUMBERS.prefetch(1), True),
        (NUMBERS.prefetch(1).batch(2), False),
        (pipelines.without_autotuning(NUMBERS), False),
        # As `Trainer` and `pipelines.read` return their data sets.
        (pipelines.without_autotuning(NUMBERS.prefetch(1)), True),
        (pipelines.without_autotuning(NUMBERS.prefetch(1)).with_options(tf.data.Options()), True),
    ],
)
def test_data_that_are_prefetched_are_not_prefetched_again(
    dataset: tf.data.Dataset, expected: bool
) -> None:
    assert is_prefetched(dataset) == expected
