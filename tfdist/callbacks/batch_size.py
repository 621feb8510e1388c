"""Warns if the batches of the data have another size than `batch_size`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import keras


class BatchSize(keras.callbacks.Callback):
    """Warns after the first epoch if its batches had an unexpected size.

    A partial last batch is accepted.

    Example:
        >>> from tfdist.callbacks.batch_size import BatchSize
        >>> trainer = tfdist.Trainer(build_model, devices=2)
        >>> check = BatchSize(trainer.stats, batch_size=64)
        >>> history = trainer.fit(x, y, batch_size=64, callbacks=[check], verbose=0)

    Args:
        stats: The trainer's statistics, with `steps_of_epoch` and `rows_of_epoch`.
        batch_size: Expected number of rows in a batch.
    """

    chief_only = only_reads = True

    def __init__(self, stats: Any, batch_size: int) -> None:
        super().__init__()
        self._stats, self._batch_size = stats, batch_size
        self._is_checked = False

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        steps, rows = self._stats.steps_of_epoch, self._stats.rows_of_epoch
        full = steps * self._batch_size
        if not self._is_checked and not full - self._batch_size < rows <= full:
            warnings.warn(
                f"The batches of the data have {rows / max(steps, 1):g} rows on average, but "
                f"batch_size is {self._batch_size}. Check that the learning rate fits the actual "
                "batch size.",
                stacklevel=2,
            )
        self._is_checked = True
