"""Which models are given whole batches, since their rows cannot be computed apart."""

from __future__ import annotations

import warnings

import keras
import numpy as np

from tfdist.errors import DataError
from tfdist.loops.feed import Feed
from tfdist.step.row_probe import why_whole
from tfdist.strategies.base import Strategy


def said(reason: str) -> str:
    """Returns what a user is told where whole batches are computed for a reason."""
    return (
        f"{reason}: one replica computes whole batches, to the numbers of one device and no faster."
    )


class WholeBatches:
    """Finds out once, for training and for the rest, and says so once.

    Args:
        model: Whose.
        strategy: Of its replicas.
        accumulate: Rounds of a training step.
    """

    def __init__(self, model: keras.Model, strategy: Strategy, accumulate: int) -> None:
        self._model, self._strategy, self._accumulate = model, strategy, accumulate
        self._reasons: dict[bool, str | None] = {}

    def for_feed(self, feed: Feed, training: bool) -> str | None:
        """Returns why each replica is given the whole batches of a feed, and has it give them.

        Args:
            feed: Before its first epoch; the model is built.
            training: Whether the model is called as in training.
        """
        if training not in self._reasons:
            self._reasons[training] = self._reason(feed, training)
        feed.whole_batches = self._reasons[training] is not None
        return self._reasons[training]

    def _reason(self, feed: Feed, training: bool) -> str | None:
        if self._strategy.num_replicas * (self._accumulate if training else 1) == 1:
            return None
        try:
            reason = why_whole(self._model, feed.first_batch, training)
        except DataError:
            if not feed.own_rows:  # there other workers may have data
                raise
            reason = None
        told = self._strategy.gather([reason is not None])
        if reason is None and np.any(told):
            reason = "another worker found rows that depend on each other"
        if reason is not None and reason not in self._reasons.values():
            warnings.warn(said(reason), stacklevel=2)
        return reason
