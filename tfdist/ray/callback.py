"""A Keras callback that reports the metrics of each epoch to Ray."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.ray.reports import report


class ReportCallback(keras.callbacks.Callback):
    """Reports the logs of each epoch with `tfdist.ray.report`.

    Within a trial of Ray Tune, the metrics have the names of the logs (`loss`, `val_accuracy`), for
    use in `tune.TuneConfig(metric=...)`.

    Example:
        >>> def fn():
        ...     import tfdist
        ...     from my_package import build_model, x, y
        ...
        ...     trainer = tfdist.Trainer(build_model, strategy="multi_worker")
        ...     report = tfdist.ray.ReportCallback()
        ...     trainer.fit(x, y, batch_size=64, callbacks=[report], verbose=0)
        >>> tfdist.ray.train(fn, num_workers=1)
    """

    only_reads = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reports the epoch's number, counted from 0, and its logs."""
        report({"epoch": epoch, **(logs or {})})
