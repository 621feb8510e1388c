"""The report of what will not match single-device results."""

from __future__ import annotations

import keras

from tfdist.console import tables
from tfdist.loops.data_handler import DataHandler
from tfdist.step.batch_norm import layers_of
from tfdist.strategies.base import Strategy
from tfdist.upstream.keras_model import seeds_of


class ExactnessReport:
    """Reports once what of a trainer's results will not match one device.

    Args:
        model: The trained model.
        strategy: Runs the replicas.
        accumulate: Rounds of a training step.
        sync_batch_norm: Whether BatchNorm uses global moments.
        is_rebuilt: Whether the model was rebuilt from one that the user still holds.
        replica_random: Whether each replica draws its own random numbers.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: Strategy,
        accumulate: int,
        sync_batch_norm: bool,
        is_rebuilt: bool = False,
        replica_random: bool = False,
    ) -> None:
        self._is_rebuilt, self._replica_random = is_rebuilt, replica_random
        self._model, self._strategy = model, strategy
        self._accumulate, self._sync_batch_norm = accumulate, sync_batch_norm
        self._is_reported = False

    def reported(self) -> str:
        """Returns the report for a table; `print_once` then prints nothing."""
        self._is_reported = True
        return self._text() or "nothing"

    def print_once(self, data: DataHandler) -> None:
        """Prints the report on the chief, unless it was reported before.

        Args:
            data: The training data; full batches are exact.
        """
        if self._is_reported or not self._strategy.is_chief:
            return
        self._is_reported = True
        if self._is_rebuilt:
            tables.text("trainer.model is trained; the model that you passed does not change")
        if not data.full_batches and (text := self._text()):
            tables.text(f"not exact: {text}")

    def _text(self) -> str:
        reasons = dict(self._strategy.inexact)
        if self._strategy.num_replicas * self._accumulate > 1:
            synchronized = [self._sync_batch_norm or x.synchronized for x in layers_of(self._model)]
            if not all(synchronized):
                cure = "sync_batch_norm" + (" without accumulate" if self._accumulate > 1 else "")
                reasons["BatchNorm"] = f"each replica uses its own moments; use {cure}"
            if self._replica_random and seeds_of(self._model):
                reasons["random layers"] = "each replica draws its own numbers"
        return "; ".join(f"{name}: {why}" for name, why in reasons.items())
