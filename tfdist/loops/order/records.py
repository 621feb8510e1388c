"""Records that `pipelines` reads: a pass begins at any batch, without reading those before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pipelines
from tfdist.loops.order.numbered import NumberedOrder
from tfdist.loops.order.passes import Distribute


class PipelineOrder(NumberedOrder):
    """What `pipelines.read` and `mix` return: they begin wherever they are told to.

    An iterator of which no batch is taken does not count as a pass, in Keras's `fit` either.
    """

    def __init__(
        self, adapter: Any, restart: pipelines.Restart, again: Callable[[Any], Any]
    ) -> None:
        super().__init__(adapter)
        self._restart, self._again = restart, again
        self._where = (0, 0)
        self._before = restart.num_iterations

    def first_batch(self) -> Any:
        with pipelines.looking():  # what is read by them goes on as if nobody had looked
            return next(iter(self.dataset), None)

    def begin(
        self, distribute: Distribute, number: int, batch: int = 0, state: Any = None
    ) -> Iterator[Any]:
        if self._distributed is None:
            dataset = self._restart.dataset(lambda: self._where)
            self._distributed = distribute(self._again(dataset).get_tf_dataset())
        self._where = (self._before + number, batch)
        self._restart.num_iterations = self._before + number + 1
        return iter(self._distributed)

    def state(self) -> dict[str, Any]:
        return {"before": self._before}

    def restore(self, state: dict[str, Any]) -> None:
        self._before = state.get("before", self._before)
