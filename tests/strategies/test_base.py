"""One device answers for itself what several workers settle among themselves."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.strategies.base import Strategy
from tfdist.strategies.collectives.end_to_end import end_to_end


def test_alone_there_is_nobody_to_ask() -> None:
    alone = Strategy()
    np.testing.assert_array_equal(alone.gather([3.0, 4.0]), [[3.0, 4.0]])
    assert alone.broadcast_text("a folder") == "a folder"
    assert not alone.stops_together
    context = alone.input_context()
    assert (context.num_input_pipelines, context.num_replicas_in_sync) == (1, 1)
    alone.barrier()


def test_what_is_laid_end_to_end_keeps_order_and_dtypes() -> None:
    """Two replicas in turns: what the other would add is zeros, or its number of rows."""

    def with_two_rows_before(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        sizes = tensors[0].shape == [2] and tensors[0].dtype == tf.int32
        return [tensors[0] + [2, 0]] if sizes else tensors

    outputs = {"a": tf.constant([[1.5], [2.5], [3.5]]), "b": (tf.constant([True] * 3), None)}
    whole = end_to_end(outputs, 1, 2, with_two_rows_before)
    np.testing.assert_array_equal(whole["a"], [[0], [0], [1.5], [2.5], [3.5]])
    np.testing.assert_array_equal(whole["b"][0], [False, False, True, True, True])
    assert whole["b"][1] is None
    with pytest.raises(UnsupportedModelError, match="holds strings"):
        end_to_end(tf.constant(["a"]), 0, 2, lambda tensors: tensors)
