"""Keras's early stopping, where a name that no metric has is an error."""

from __future__ import annotations

from collections.abc import Mapping

import keras

from tfdist.errors import ConfigurationError, did_you_mean


class EarlyStopping(keras.callbacks.EarlyStopping):
    """Ends the training after epochs without improvement; arguments as Keras's.

    Raises:
        ConfigurationError: After the first epoch: the metric is none of the training's, where
            Keras would go on to the end; or nobody knows whether more of it is better.
    """

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        known = list(logs or {})
        if self.monitor not in known:
            raise ConfigurationError(
                f"Early stopping by {self.monitor!r}: expected one of {', '.join(known)}."
                f"{did_you_mean(self.monitor, known)}"
            )
        try:
            super().on_epoch_end(epoch, logs)
        except ValueError as error:  # Keras does not know the direction
            raise ConfigurationError(
                f"Early stopping by {self.monitor!r}: {error} Return the callback from "
                "callbacks(config) of the recipe instead."
            ) from error
