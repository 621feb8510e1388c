"""One device answers for itself what several workers settle among themselves."""

from __future__ import annotations

import numpy as np

from tfdist.strategies.base import Strategy


def test_alone_there_is_nobody_to_ask() -> None:
    alone = Strategy()
    np.testing.assert_array_equal(alone.gather([3.0, 4.0]), [[3.0, 4.0]])
    assert alone.broadcast_text("a folder") == "a folder"
    assert not alone.stops_together
    context = alone.input_context()
    assert (context.num_input_pipelines, context.num_replicas_in_sync) == (1, 1)
    alone.barrier()
