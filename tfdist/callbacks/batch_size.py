"""Says so where the data came in other batches than they were expected in."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import keras


class BatchSize(keras.callbacks.Callback):
    """Warns after the first epoch where its batches had other sizes; the last one may be short.

    Args:
        stats: A trainer's, with `steps_of_epoch` and `rows_of_epoch`.
        batch_size: Rows that a batch is expected to have.
    """

    chief_only = only_reads = True

    def __init__(self, stats: Any, batch_size: int) -> None:
        super().__init__()
        self._stats, self._batch_size = stats, batch_size
        self._looked = False

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        steps, rows = self._stats.steps_of_epoch, self._stats.rows_of_epoch
        full = steps * self._batch_size
        if not self._looked and not full - self._batch_size < rows <= full:
            warnings.warn(
                f"The batches of the data had {rows / max(steps, 1):g} rows on average, where "
                f"batch_size is {self._batch_size}: the learning rate may be meant for the latter.",
                stacklevel=2,
            )
        self._looked = True
