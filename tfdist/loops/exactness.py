"""What of a training is not what one may expect of it, and the lines that say so."""

from __future__ import annotations

import keras

from tfdist.console import tables
from tfdist.loops.data_handler import DataHandler
from tfdist.step.batch_norm import layers_of
from tfdist.strategies.base import Strategy
from tfdist.upstream.keras_model import seeds_of


class ExactnessReport:
    """Knows what is not exact of a trainer, and tells it once.

    Args:
        model: What is trained.
        strategy: Of its replicas.
        accumulate: Rounds of a training step.
        sync_batch_norm: Whether BatchNorm takes global moments.
        is_rebuilt: Whether the model was made of another one, which its user may go on with.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: Strategy,
        accumulate: int,
        sync_batch_norm: bool,
        is_rebuilt: bool = False,
    ) -> None:
        self._is_rebuilt = is_rebuilt
        self._model, self._strategy = model, strategy
        self._accumulate, self._sync_batch_norm = accumulate, sync_batch_norm
        self._told = False

    def told(self) -> str:
        """Returns it for a table, after which no line says it again."""
        self._told = True
        return self._text() or "nothing"

    def print_once(self, feed: DataHandler) -> None:
        """Prints it, on the chief and where nobody was told.

        Args:
            feed: What the training is about to read; whole batches are exact.
        """
        if self._told or not self._strategy.is_chief:
            return
        self._told = True
        if self._is_rebuilt:
            tables.text("trainer.model is trained: the model that was handed over stays as it was")
        if not feed.full_batches and (text := self._text()):
            tables.text(f"not exact: {text}")

    def _text(self) -> str:
        reasons = dict(self._strategy.inexact)
        if self._strategy.num_replicas * self._accumulate > 1:
            synchronised = [self._sync_batch_norm or x.synchronized for x in layers_of(self._model)]
            if not all(synchronised):
                cure = "sync_batch_norm" + (" without accumulate" if self._accumulate > 1 else "")
                reasons["BatchNorm"] = f"each share has its own moments; {cure} mends it"
            if seeds_of(self._model):
                reasons["random layers"] = "each share draws numbers of its own"
        return "; ".join(f"{name}: {why}" for name, why in reasons.items())
