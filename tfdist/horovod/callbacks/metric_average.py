"""Metrics over the rows of all ranks."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.horovod.ranks import strategy


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces the metrics in the logs of an epoch by those over the rows of all ranks.

    It sums the states of the metrics over the ranks and computes the results from the sums. This is
    exact for AUC and for shards of any size, for which an average of results is not. The states of
    a metric must be sums over batches, as in Keras's metrics. Put it before callbacks that read
    metrics.

    The variables of the model do not change. `evaluate` outside of `fit` returns the results of its
    rank.

    Example:
        >>> import tfdist.horovod as hvd
        >>> hvd.init()
        >>> callbacks = [hvd.callbacks.MetricAverageCallback()]
        >>> history = build_model().fit(x, y, verbose=0, callbacks=callbacks)
    """

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._train: dict[str, Any] | None = None
        self._test: dict[str, Any] = {}

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        # The validation within fit is about to reset the training metrics.
        if self._in_epoch() and self._train is None:
            self._train = self._results()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._in_epoch():
            self._test = self._results()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        train = self._results() if self._train is None else self._train
        new = train | {f"val_{name}": value for name, value in self._test.items()}
        if logs is not None:
            logs.update({name: new[name] for name in logs.keys() & new.keys()})
        del self._train

    def _in_epoch(self) -> bool:
        return hasattr(self, "_train")

    def _results(self) -> dict[str, Any]:
        variables = self.model.metrics_variables
        sums = strategy().all_reduce([v.value for v in variables])
        with keras.StatelessScope(list(zip(variables, sums, strict=True))):
            results = self.model.get_metrics_result()
        return {name: float(value) for name, value in results.items()}
