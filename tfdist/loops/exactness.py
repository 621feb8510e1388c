"""Reports options and layers that will not match single-device results."""

from __future__ import annotations

import keras

from tfdist.console import tables
from tfdist.loops.data_handler import DataHandler
from tfdist.patches.batch_norm import layers_of
from tfdist.replica.options import StepOptions
from tfdist.strategies.base import Strategy
from tfdist.upstream.keras_model import drawing_layers


class ExactnessReport:
    """Reports, once, why a trainer's results will not match single-device training.

    Args:
        model: The trained model.
        strategy: Runs the replicas.
        options: The options of the trainer's steps.
        is_rebuilt: Whether the model was rebuilt from one that the user passed.
    """

    def __init__(
        self, model: keras.Model, strategy: Strategy, options: StepOptions, is_rebuilt: bool
    ) -> None:
        self._model, self._strategy, self._options = model, strategy, options
        self._is_rebuilt = is_rebuilt
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
        if self._is_reported or not self._strategy.group.is_chief:
            return
        self._is_reported = True
        if self._is_rebuilt:
            tables.text(
                "The trainer trains trainer.model. The model that you passed is not changed."
            )
        if not data.full_batches and (text := self._text()):
            tables.text(f"not exact: {text}")

    def reasons(self) -> dict[str, str]:
        """Returns why training will not match one device, by option or layer."""
        reasons, options = dict(self._strategy.inexact), self._options
        if self._strategy.num_replicas * options.accumulate > 1:
            layers = layers_of(self._model)
            if not all(options.sync_batch_norm or layer.synchronized for layer in layers):
                use = "sync_batch_norm" + (" without accumulate" if options.accumulate > 1 else "")
                reasons["BatchNorm"] = f"each replica uses its own moments; use {use}"
            if options.replica_random and drawing_layers(self._model):
                reasons["random layers"] = "each replica uses different random numbers"
        return reasons

    def _text(self) -> str:
        return "; ".join(f"{name}: {why}" for name, why in self.reasons().items())
