"""Handles workers whose data ends before that of the other workers.

This concerns datasets that each worker creates separately, with a function of a
`tf.distribute.InputContext`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from tfdist.errors import DataError
from tfdist.loops.data_handler import DataHandler, uneven_message
from tfdist.loops.epoch import Observer
from tfdist.strategies.base import Strategy
from tfdist.strategies.inner_loop import LoopResult

_OUTCOMES = {
    "pad": "Later steps ran without rows from the workers whose data had ended",
    "stop": "The epoch ended where the data of the first worker ended",
}


class BatchCounts(Observer):
    """Counts the batches of each worker in an epoch.

    Args:
        strategy: The strategy.

    Raises:
        DataError: The numbers differ, and `uneven_data` of the data is `"refuse"`.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._counts = [0] * strategy.group.size

    def begin_epoch(self, data: DataHandler) -> None:
        self._data = data
        self._counts = [0] * len(self._counts)

    def columns(self, result: LoopResult) -> list[float]:
        return [result.num_read] if self._data.own_rows and len(self._counts) > 1 else []

    def compare(self, rows: np.ndarray) -> None:
        self._counts = [n + int(more) for n, more in zip(self._counts, rows[:, 0], strict=True)]
        if self._data.uneven_data == "refuse" and _differ(self._counts):
            raise DataError(uneven_message(self._counts))

    def report(self, place: str) -> None:
        """Warns on the chief if the workers had different numbers of batches.

        Args:
            place: The name of the epoch.
        """
        counts = self._counts if self._data.sizes is None else self._data.sizes
        if _differ(counts) and self._strategy.group.is_chief:
            mode = self._data.uneven_data
            numbers = ", ".join(map(str, counts))
            warnings.warn(
                f"The workers had {numbers} batches in {place}, by rank. {_OUTCOMES[mode]} "
                f"(uneven_data={mode!r}).",
                stacklevel=3,
            )


def _differ(counts: Sequence[int]) -> bool:
    return len(set(counts)) > 1
