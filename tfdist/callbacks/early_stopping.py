"""Keras's `EarlyStopping`, but an unknown metric is an error."""

from __future__ import annotations

from collections.abc import Mapping

import keras

from tfdist.errors import ConfigurationError, did_you_mean


class EarlyStopping(keras.callbacks.EarlyStopping):
    """Stops training when a metric no longer improves; takes the arguments of Keras's class.

    Keras only warns about an unknown metric, and trains all epochs.

    Example:
        >>> from tfdist.callbacks.early_stopping import EarlyStopping
        >>> trainer = tfdist.Trainer(build_model, devices=2)
        >>> stop = EarlyStopping("loss", patience=0, min_delta=100)
        >>> history = trainer.fit(x, y, batch_size=64, epochs=9, callbacks=[stop], verbose=0)
        >>> history.epoch
        [0, 1]

    Raises:
        ConfigurationError: After the first epoch, if the logs do not contain the metric, or if it
            is unknown whether higher values of the metric are better.
    """

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        names = list(logs or {})
        if self.monitor not in names:
            raise ConfigurationError(
                f"Early stopping by {self.monitor!r}: expected one of {', '.join(names)}."
                f"{did_you_mean(self.monitor, names)}"
            )
        try:
            super().on_epoch_end(epoch, logs)
        except ValueError as error:  # Keras cannot infer whether higher values are better
            raise ConfigurationError(
                f"Early stopping by {self.monitor!r}: {error} Return the callback, with its mode, "
                "from callbacks(config) of the recipe instead."
            ) from error
