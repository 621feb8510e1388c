"""Arrays: a pass begins anywhere at once, since its order follows from a seed and its number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.loops.order.numbered import NumberedOrder
from tfdist.loops.order.passes import Distribute
from tfdist.upstream import keras_data
from tfdist.upstream.keras_data import Shuffle


class ShuffledArrays(NumberedOrder):
    """Arrays: their order follows from a seed, and from the number of the pass.

    Where a seed was set it is Keras's order for that seed, which is one for all passes. Where none
    was, one is drawn, and each pass has another order.
    """

    def __init__(self, adapter: Any) -> None:
        super().__init__(adapter)
        self._number = 0
        self._shuffle = Shuffle.of_this_process(lambda: self._number)

    @property
    def dataset(self) -> tf.data.Dataset:
        if self._dataset is None:
            self._dataset = keras_data.dataset_of_arrays(self._adapter, self._shuffle)
        return self._dataset

    def first_batch(self) -> Any:
        return next(iter(self.dataset), None)  # a look counts for nothing

    def begin(
        self, distribute: Distribute, number: int, batch: int = 0, state: Any = None
    ) -> Iterator[Any]:
        self._number = number
        return iter(distribute(self.dataset.skip(batch)) if batch else self._all(distribute))

    def state(self) -> dict[str, Any]:
        return {"seed": self._shuffle.seed, "as Keras": self._shuffle.as_keras}

    def restore(self, state: dict[str, Any]) -> None:
        if state and state != self.state():
            self._shuffle.seed, self._shuffle.as_keras = state["seed"], state["as Keras"]
            self._dataset = self._distributed = None
