"""A Keras callback that reports the metrics of each epoch to Ray."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.ray.reports import report


class ReportCallback(keras.callbacks.Callback):
    """Reports the logs of each epoch by `tfdist.ray.report`.

    Within a trial of Ray Tune, the names are those of the logs (`loss`, `val_accuracy`), so they
    are what `tune.TuneConfig(metric=...)` names.
    """

    only_reads = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reports the epoch's number, counted from 0, and its logs."""
        report({"epoch": epoch, **(logs or {})})
