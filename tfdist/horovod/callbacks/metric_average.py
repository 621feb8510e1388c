"""Metrics over the rows of all ranks, from the summed states of the metrics."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.horovod.ranks import strategy


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces each rank's metrics by those of all ranks at the end of an epoch, before others.

    The states are summed and the results taken after: exact for AUC and for shards of any size,
    where averages of results are not. That needs metrics whose states add up over batches, as
    those of Keras do. Put it before callbacks that read metrics.

    The model's own variables are left as they are; `evaluate` alone returns its rank's results.
    """

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._train: dict[str, Any] | None = None
        self._test: dict[str, Any] = {}

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        # Within fit: the validation is about to reset the states of the training.
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
