"""The compiled functions that compute a model's outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.loops.feed import Feed
from tfdist.strategies.base import Strategy
from tfdist.strategies.inner_loop import Made
from tfdist.upstream.keras_model import global_generator, use_global_generator

#: Computes the outputs for the iterator's next batch, by replica; none at the end of the data.
OutputsFn = Callable[[Iterator[Any]], tuple[Made, list[Any]]]


class Outputs:
    """Traces what computes outputs, once for shares and once for whole batches.

    Args:
        model: Built, in the strategy's scope.
        strategy: Of its replicas.
    """

    def __init__(self, model: keras.Model, strategy: Strategy) -> None:
        self._model, self._strategy = model, strategy
        self._traced: dict[bool, Any] = {}

    @property
    def made(self) -> bool:
        """Whether there is one yet."""
        return bool(self._traced)

    def function(self, feed: Feed, whole: bool) -> OutputsFn:
        """Returns the function that computes the outputs for one batch.

        Args:
            feed: Of the batches.
            whole: Whether every replica is given whole batches.
        """
        outputs: Any = functools.partial(self._of_next, whole)
        if not self._model.run_eagerly:
            if whole not in self._traced:
                self._traced[whole] = tf.function(outputs, reduce_retracing=True, autograph=False)
            outputs = self._traced[whole]
        # Batches without rows follow, which nobody may leave while others have some.
        ends_without_rows = feed.own_rows and self._strategy.stops_together

        def predict(iterator: Iterator[Any]) -> tuple[Made, list[Any]]:
            try:
                with self._strategy.together():
                    rows, checksum, by_replica = outputs(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                return Made(0, 0, 0.0), []
            if ends_without_rows and keras.tree.flatten(by_replica)[0].shape[0] == 0:
                return Made(0, 0, 0.0), []
            return Made(1, int(rows), 0.0, int(checksum)), by_replica

        return predict

    def _of_next(self, whole: bool, iterator: Any) -> tuple[tf.Tensor, tf.Tensor, list[Any]]:
        """The rows and the checksum of the next global batch, and the outputs for it."""
        generator = global_generator()

        def on_rows(rows: Any) -> Any:
            if generator is not None:
                use_global_generator(generator)
            return self._model.predict_step(rows)

        element = self._strategy.unpack(next(iterator))
        outputs = self._strategy.outputs(on_rows, element, whole)
        return element.num_rows, element.checksum, outputs
