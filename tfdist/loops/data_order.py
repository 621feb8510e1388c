"""The order of data in each pass, and how to resume at any batch of any pass.

A pass is one iterator. A shuffled `tf.data.Dataset` has a different order in each pass. `DataOrder`
is for data of which nothing else is known. It starts the same passes at the same time as Keras's
`fit`, even if some are not used. To resume within a pass, it starts all passes before it and skips
batches. Arrays and `pipelines` datasets can start directly at any batch of any pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

import pipelines
from tfdist.errors import DataError
from tfdist.upstream import input_data
from tfdist.upstream.input_data import Shuffle

#: Distributes a dataset of batches over the replicas.
Distribute = Callable[[tf.data.Dataset], Any]


class DataOrder:
    """The order of data that can be iterated repeatedly, of which nothing else is known."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self._dataset: Any = None
        self._distributed: Any = None
        self._first: Any = None
        # The iterator that `first_batch` has used. The next pass continues with it.
        self._peeked: Any = None
        self._ahead: Iterator[Any] | None = None

    @property
    def dataset(self) -> tf.data.Dataset:
        """The dataset of global batches."""
        if self._dataset is None:
            self._dataset = input_data.dataset_of(self._adapter)
        return self._dataset

    def first_batch(self) -> Any:
        """Returns the first batch, or None. The next pass still starts with it."""
        if self._first is None:
            iterator = iter(self.dataset)
            self._first = next(iterator, None)
            self._peeked = None if self._first is None else iterator
        return self._first

    def begin(
        self, distribute: Distribute, number: int, batch: int = 0, state: Any = None
    ) -> Iterator[Any]:
        """Returns an iterator over distributed batches.

        Args:
            distribute: Distributes a dataset over the replicas.
            number: Number of the pass, from 0.
            batch: Number of the first batch to return.
            state: The state of an iterator at this batch, from `state_of`, if there is one.

        Raises:
            DataError: The pass has fewer batches.
        """
        del number  # the dataset counts its passes
        if state is not None and state["kind"] == _kind(self._all(distribute)):
            self._peeked = None
            iterator = iter(self._all(distribute))
            input_data.set_iterator_state(iterator, state["state"])
            return iterator
        iterator, self._ahead = self._ahead or self._next_pass(distribute), None
        for number in range(batch):
            if next(iterator, None) is None:
                raise DataError(
                    f"The data ended after {number} batches, but the run has already used {batch}. "
                    "Resume with the data that it was started with."
                )
        return iterator

    def begin_ahead(self, distribute: Distribute) -> None:
        """Starts the next pass now, because other code may iterate the data before its use."""
        self._ahead = self._next_pass(distribute)

    def begin_unused(self) -> None:
        """Starts a pass that is not used."""
        if self._peeked is not None:
            self._peeked = None
        else:
            iter(self.dataset)

    def skip_pass(self) -> None:
        """Skips a pass, so that a shuffle continues with the order of the next pass."""
        if self._peeked is not None:
            self._peeked = None
            return
        begun = iter(self.dataset)
        if not input_data.has_iterator_state(self.dataset):
            next(begun, None)  # a Python generator starts at its first batch

    def state_of(self, iterator: Any) -> Any:
        """Returns the state of an iterator over distributed batches, or None if it has none.

        Only endless data has one. If a finite dataset has prefetched to the end of a pass, its
        state does not contain the shuffle, and the next pass would have a different order.
        """
        if not is_endless(self.dataset):
            return None
        state = input_data.iterator_state(iterator)
        return None if state is None else {"kind": _kind(self._distributed), "state": state}

    def problem(self, number: int, batch: int, num_batches: int) -> str | None:
        """Returns which record of some batches of a pass cannot be read, if the data tell it."""
        return None

    def state(self) -> dict[str, Any]:
        """Returns the state that determines the order of a pass of given number, as JSON values."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the `state` of another order of the same data."""

    def _all(self, distribute: Distribute) -> Any:
        if self._distributed is None:
            self._distributed = distribute(self.dataset)
        return self._distributed

    def _next_pass(self, distribute: Distribute) -> Iterator[Any]:
        if self._peeked is None:
            return iter(self._all(distribute))
        first = tf.data.Dataset.from_tensors(self._first)
        peeked, self._peeked = self._peeked, None
        rest = (
            tf.data.Dataset.counter()
            .map(lambda _: peeked.get_next_as_optional())
            .take_while(lambda element: element.has_value())
            .map(lambda element: element.get_value())
        )
        all_batches = first.concatenate(rest)
        return iter(distribute(pipelines.without_autotuning(all_batches)))


def is_endless(dataset: tf.data.Dataset) -> bool:
    """Returns whether a dataset is known to be endless."""
    return bool(dataset.cardinality() == tf.data.INFINITE_CARDINALITY)


def _kind(distributed: Any) -> str:
    """Returns a description that must be equal for the state of an iterator to be valid."""
    return f"TensorFlow {tf.version.VERSION}, {distributed.element_spec}"


class NumberedOrder(DataOrder):
    """Data whose passes do not depend on previous passes, but only on the number of the pass."""

    def begin_ahead(self, distribute: Distribute) -> None:
        pass

    def begin_unused(self) -> None:
        pass

    def skip_pass(self) -> None:
        pass

    def state_of(self, iterator: Any) -> Any:
        return None


class ShuffledArrays(NumberedOrder):
    """Arrays, whose order follows from a seed and the number of the pass.

    With `keras.utils.set_random_seed`, the order is the same as in Keras for that seed, and in all
    passes. Without it, a random seed is used, and each pass has a different order.
    """

    def __init__(self, adapter: Any) -> None:
        super().__init__(adapter)
        self._number = 0
        self._shuffle = Shuffle.of_this_process(lambda: self._number)

    @property
    def dataset(self) -> tf.data.Dataset:
        if self._dataset is None:
            self._dataset = input_data.dataset_of_arrays(self._adapter, self._shuffle)
        return self._dataset

    def first_batch(self) -> Any:
        return next(iter(self.dataset), None)  # does not count as a pass

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
    """Datasets of `pipelines.read` and `mix`, which can start at any batch of any pass.

    As in Keras's `fit`, an iterator from which no batch is taken does not count as a pass.
    """

    def __init__(
        self, adapter: Any, restart: pipelines.Restart, adapter_of: Callable[[Any], Any]
    ) -> None:
        super().__init__(adapter)
        self._restart, self._adapter_of = restart, adapter_of
        self._where = (0, 0)
        self._before = restart.num_iterations

    def first_batch(self) -> Any:
        with pipelines.peek():  # does not count as a pass
            return next(iter(self.dataset), None)

    def begin(
        self, distribute: Distribute, number: int, batch: int = 0, state: Any = None
    ) -> Iterator[Any]:
        if self._distributed is None:
            dataset = self._restart.dataset(lambda: self._where)
            self._distributed = distribute(input_data.dataset_of(self._adapter_of(dataset)))
        self._where = (self._before + number, batch)
        self._restart.num_iterations = self._before + number + 1
        return iter(self._distributed)

    def problem(self, number: int, batch: int, num_batches: int) -> str | None:
        return self._restart.problem(self._before + number, batch, num_batches)

    def state(self) -> dict[str, Any]:
        return {"before": self._before}

    def restore(self, state: dict[str, Any]) -> None:
        self._before = state.get("before", self._before)


def order_of(x: Any, adapter: Any, adapter_of: Callable[[Any], Any]) -> DataOrder:
    """Returns the order of data.

    Args:
        x: The data.
        adapter: Keras's adapter that reads them.
        adapter_of: Returns an adapter for another dataset with the same options.
    """
    if (restart := pipelines.restart_of(x)) is not None:
        return PipelineOrder(adapter, restart, adapter_of)
    return ShuffledArrays(adapter) if input_data.are_arrays(adapter) else DataOrder(adapter)


def resume_method(dataset: tf.data.Dataset) -> str:
    """Describes how a dataset resumes within a pass, for the start-up table."""
    if pipelines.restart_of(dataset) is not None:
        return "at the position in the records"
    if is_endless(dataset) and input_data.has_iterator_state(dataset):
        return "from the state of the iterator, or by reading the used batches again"
    return "by reading the used batches again"
