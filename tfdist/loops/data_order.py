"""How data of which nothing is known begin at any batch of any pass over them.

A pass is one iterator: a `tf.data.Dataset` that shuffles has another order in each. So as many are
begun as Keras's `fit` begins, and in the same places, of which some go unused. To go on within a
pass, those before it are begun, and the batches before are taken, to be thrown away.

Data whose passes are told their number, and so begin anywhere.

Arrays: a pass begins anywhere at once, since its order follows from a seed and its number.

Records that `pipelines` reads: a pass begins at any batch, without reading those before.

Which order data have, and what a start-up table says of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

import pipelines
from tfdist.errors import DataError
from tfdist.upstream import keras_data, tensorflow_data
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
        self._first: Any = None
        # That the first batch was taken from: the next pass goes on with it.
        self._looked_at: Iterator[Any] | None = None
        self._ahead: Iterator[Any] | None = None

    @property
    def dataset(self) -> tf.data.Dataset:
        """Of global batches, for whoever looks at them besides."""
        if self._dataset is None:
            self._dataset = self._adapter.get_tf_dataset()
        return self._dataset

    def first_batch(self) -> Any:
        """Returns the first batch, with which the next pass begins all the same; None: no batch."""
        if self._first is None:
            iterator = iter(self.dataset)
            self._first = next(iterator, None)
            self._looked_at = None if self._first is None else iterator
        return self._first

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
        if state is not None and state["kind"] == _kind(self._all(distribute)):
            self._looked_at = None
            iterator = iter(self._all(distribute))
            tensorflow_data.set_iterator_state(iterator, state["state"])
            return iterator
        iterator, self._ahead = self._ahead or self._next_pass(distribute), None
        for number in range(batch):
            if next(iterator, None) is None:
                raise DataError(
                    f"The data ended after {number} of {batch} batches that the run has had of "
                    "them: go on with the data that it was begun with."
                )
        return iterator

    def begin_ahead(self, distribute: Distribute) -> None:
        """Begins the next pass now: others may go through the same data before it is wanted."""
        self._ahead = self._next_pass(distribute)

    def begin_in_vain(self) -> None:
        """Begins a pass of which nobody takes a batch."""
        if self._looked_at is not None:
            self._looked_at = None
        else:
            iter(self.dataset)

    def leave_out(self) -> None:
        """Lets the next pass be the one after it: a shuffle has another order each time."""
        if self._looked_at is not None:
            self._looked_at = None
            return
        begun = iter(self.dataset)
        if not tensorflow_data.has_iterator_state(self.dataset):
            next(begun, None)  # Python may count passes, and hears of one with its first batch

    def state_of(self, iterator: Any) -> Any:
        """Returns the state of an iterator over distributed batches; None: it has none.

        Only of data without an end. What was read ahead to the end of a pass is saved without its
        shuffle, and the next pass has another order then.
        """
        if not is_endless(self.dataset):
            return None
        found = tensorflow_data.iterator_state(iterator)
        return None if found is None else {"kind": _kind(self._distributed), "state": found}

    def state(self) -> dict[str, Any]:
        """Returns what the order follows from besides the number of a pass; JSON's values."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes over what another one's order followed from."""

    def _all(self, distribute: Distribute) -> Any:
        if self._distributed is None:
            self._distributed = distribute(self.dataset)
        return self._distributed

    def _next_pass(self, distribute: Distribute) -> Iterator[Any]:
        if self._looked_at is None:
            return iter(self._all(distribute))
        first = tf.data.Dataset.from_tensors(self._first)
        whole, self._looked_at = first.concatenate(_rest_of(self._looked_at)), None
        return iter(distribute(whole))


def is_endless(dataset: tf.data.Dataset) -> bool:
    """Tells whether a data set is known to have no end."""
    return bool(dataset.cardinality() == tf.data.INFINITE_CARDINALITY)


def _rest_of(iterator: Any) -> tf.data.Dataset:
    """Returns what an iterator of `tf.data` has yet to give, for one pass."""
    return (
        tf.data.Dataset.counter()
        .map(lambda _: iterator.get_next_as_optional())
        .take_while(lambda element: element.has_value())
        .map(lambda element: element.get_value())
    )


def _kind(distributed: Any) -> str:
    """What has to be alike where a state of an iterator is to hold."""
    return f"TensorFlow {tf.version.VERSION}, {distributed.element_spec}"


class NumberedOrder(DataOrder):
    """Nothing is begun ahead, in vain or to be left out: no pass depends on those before it."""

    def begin_ahead(self, distribute: Distribute) -> None:
        pass

    def begin_in_vain(self) -> None:
        pass

    def leave_out(self) -> None:
        pass

    def state_of(self, iterator: Any) -> Any:
        return None


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
    if is_endless(dataset) and tensorflow_data.has_iterator_state(dataset):
        return "from the state of the iterator, or past the batches already seen"
    return "past the batches already seen, which are read again"
