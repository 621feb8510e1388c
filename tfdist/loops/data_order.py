"""How a feed's data begin at any batch of any pass over them, so that a training can go on there.

A pass is one iterator. Data of a seed and a number begin anywhere at once; of others, the passes
before are begun and the batches before are taken, to be thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

import pipelines
from tfdist.errors import DataError
from tfdist.upstream import keras_data, tensorflow
from tfdist.upstream.keras_data import Shuffle

#: Splits a data set of batches over the replicas.
Distribute = Callable[[tf.data.Dataset], Any]


class DataOrder:
    """Data of which nothing is known but that they can be gone through again.

    Args:
        adapter: Of Keras; reads the data.
    """

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self._dataset: Any = None
        self._distributed: Any = None

    @property
    def dataset(self) -> tf.data.Dataset:
        """Of global batches, for whoever looks at them besides."""
        if self._dataset is None:
            self._dataset = self._adapter.get_tf_dataset()
        return self._dataset

    def begin(
        self, distribute: Distribute, number: int, batch: int = 0, state: Any = None
    ) -> Iterator[Any]:
        """Returns an iterator over distributed batches.

        Args:
            distribute: Does so with a data set.
            number: Of the pass, from 0.
            batch: Of the pass, with which to begin.
            state: Of an iterator there, which `state_of` returned; None: it had none.

        Raises:
            DataError: There are no such batches.
        """
        del number  # the data count for themselves
        distributed = self._all(distribute)
        iterator = iter(distributed)
        if state is not None and state["state"] is not None and state["kind"] == _kind(distributed):
            tensorflow.set_iterator_state(iterator, state["state"])
            return iterator
        for number in range(batch):
            if next(iterator, None) is None:
                raise DataError(
                    f"The data ended after {number} of {batch} batches that the run has had of "
                    "them: go on with the data that it was begun with."
                )
        return iterator

    def state_of(self, iterator: Any) -> Any:
        """Returns the state of an iterator over distributed batches; None: it has none.

        Only of data without an end. What was read ahead to the end of a pass is saved without its
        shuffle, and the next pass has another order then.
        """
        if not _is_endless(self.dataset):
            return None
        found = tensorflow.iterator_state(iterator)
        return None if found is None else {"kind": _kind(self._distributed), "state": found}

    def leave_out(self) -> None:
        """Lets the next pass be the one after it: a shuffle has another order each time."""
        begun = iter(self.dataset)
        if not tensorflow.has_iterator_state(self.dataset):
            next(begun, None)  # Python may count passes, and hears of one with its first batch

    def state(self) -> dict[str, Any]:
        """Returns what the order follows from besides the number of a pass; JSON's values."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes over what another one's order followed from."""

    def _all(self, distribute: Distribute) -> Any:
        if self._distributed is None:
            self._distributed = distribute(self.dataset)
        return self._distributed


class ShuffledArrays(DataOrder):
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

    def begin(
        self, distribute: Distribute, number: int, batch: int = 0, state: Any = None
    ) -> Iterator[Any]:
        self._number = number
        return iter(distribute(self.dataset.skip(batch)) if batch else self._all(distribute))

    def state_of(self, iterator: Any) -> Any:
        return None  # they begin anywhere

    def leave_out(self) -> None:
        pass  # a pass is told its number

    def state(self) -> dict[str, Any]:
        return {"seed": self._shuffle.seed, "as Keras": self._shuffle.as_keras}

    def restore(self, state: dict[str, Any]) -> None:
        if state and state != self.state():
            self._shuffle.seed, self._shuffle.as_keras = state["seed"], state["as Keras"]
            self._dataset = self._distributed = None


class PipelineOrder(DataOrder):
    """What `pipelines.read` and `mix` return: they begin wherever they are told to."""

    def __init__(
        self, adapter: Any, restart: pipelines.Restart, again: Callable[[Any], Any]
    ) -> None:
        super().__init__(adapter)
        self._restart, self._again = restart, again
        self._where = (0, 0)
        self._before = restart.num_iterations

    def begin(
        self, distribute: Distribute, number: int, batch: int = 0, state: Any = None
    ) -> Iterator[Any]:
        if self._distributed is None:
            dataset = self._restart.dataset(lambda: self._where)
            self._distributed = distribute(self._again(dataset).get_tf_dataset())
        self._where = (self._before + number, batch)
        self._restart.num_iterations = self._before + number + 1
        return iter(self._distributed)

    def state_of(self, iterator: Any) -> Any:
        return None  # likewise

    def leave_out(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {"before": self._before}

    def restore(self, state: dict[str, Any]) -> None:
        self._before = state.get("before", self._before)


def _is_endless(dataset: tf.data.Dataset) -> bool:
    return bool(dataset.cardinality() == tf.data.INFINITE_CARDINALITY)


def _kind(distributed: Any) -> str:
    """What has to be alike where a state of an iterator is to hold."""
    return f"TensorFlow {tf.version.VERSION}, {distributed.element_spec}"


def order_of(x: Any, adapter: Any, again: Callable[[Any], Any]) -> DataOrder:
    """Returns how data begin.

    Args:
        x: The data.
        adapter: Of Keras; reads them.
        again: Returns an adapter for another data set in their place.
    """
    if (restart := pipelines.restart_of(x)) is not None:
        return PipelineOrder(adapter, restart, again)
    return ShuffledArrays(adapter) if keras_data.are_arrays(adapter) else DataOrder(adapter)


def going_on(dataset: tf.data.Dataset) -> str:
    """Returns what the start-up table says of how a data set goes on within a pass."""
    if pipelines.restart_of(dataset) is not None:
        return "at the position in the records"
    if _is_endless(dataset) and tensorflow.has_iterator_state(dataset):
        return "from the state of the iterator, or past the batches already seen"
    return "past the batches already seen, which are read again"
