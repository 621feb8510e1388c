"""Converts data in any form that Keras accepts to global batches for the replicas.

`DataHandler` handles the data of one `fit`, `evaluate` or `predict`. `EpochDataHandlers` is for a
`fit` whose batch size changes during training.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.errors import ConfigurationError, DataError
from tfdist.loops.data_order import NumberedOrder, order_of
from tfdist.strategies.base import Strategy
from tfdist.strategies.batches import CheckData, Element
from tfdist.strategies.feed import Feed, UnevenData, prefetched, without_optionals
from tfdist.upstream import input_data
from tfdist.upstream.features import existing

_EMPTY = "The data has no batches. Check the dataset, its filters and its shards."


class DataHandler:
    """Global batches for one `fit`, `evaluate` or `predict`.

    Args:
        strategy: The strategy, which splits the batches.
        training: Whether to warn of batches with fewer rows than replicas.
        x: As in `keras.Model.fit`, or a function of a `tf.distribute.InputContext` that
            returns this worker's `tf.data.Dataset`.
        check_data: How much of the global batches workers compare; also an attribute.
        uneven_data: Where an epoch of training ends if workers with `own_rows` have different
            numbers of batches; also an attribute.
        **options: As in `keras.Model.fit`: `y`, `sample_weight`, `batch_size` (global),
            `steps_per_epoch`, `shuffle`, `class_weight`.

    Attributes:
        num_batches: Steps per epoch; None if unknown.
        batch_size: Rows of a global batch; None if unknown.
        may_end: Whether the data may end before `num_batches`.
        own_rows: Whether each worker reads its own rows of the global batches.
        sizes: Number of batches of each worker's dataset, by rank; None if unknown, or if all
            workers read the same data.
        source: The data as passed.
        are_arrays: Whether the data consists of arrays in memory.

    Raises:
        ConfigurationError: The number of steps is negative.
        DataError: There is no data, or workers have different numbers of batches and `uneven_data`
            is `"refuse"`.
    """

    def __init__(
        self,
        strategy: Strategy,
        x: Any,
        training: bool = False,
        check_data: CheckData = "full",
        uneven_data: UnevenData = "pad",
        **options: Any,
    ) -> None:
        self.source, self.uneven_data, self.check_data = x, uneven_data, check_data
        steps = limited_steps_per_epoch(options.get("steps_per_epoch"))
        options["steps_per_epoch"] = self._steps_per_epoch = steps
        if callable(x) and not isinstance(x, tf.data.Dataset):
            x = x(strategy.feed.input_context())
            self.own_rows = True
        else:
            self.own_rows = False
        if isinstance(x, (tf.distribute.DistributedDataset, tf.distribute.DistributedIterator)):
            raise DataError(
                f"The data is a tf.distribute.{type(x).__name__}, but tfdist splits "
                "batches itself. Pass the plain tf.data.Dataset of global batches, or a function "
                "of a tf.distribute.InputContext that returns this worker's dataset."
            )
        if isinstance(x, (tf.data.Dataset, types.GeneratorType)):
            options["shuffle"] = False  # they define their own order; Keras would warn

        def adapter_of(x: Any) -> Any:
            return input_data.data_adapter(x, **options)

        try:
            self._adapter = adapter_of(x)
            self._order = order_of(x, self._adapter, adapter_of)
            self._dataset = self._order.dataset
        except (ValueError, TypeError) as error:
            raise DataError(
                f"Cannot read the data: {error}\nPass data that keras.Model.fit accepts, or a "
                "function of a tf.distribute.InputContext that returns a batched tf.data.Dataset."
            ) from error
        self.batch_size = self._adapter.batch_size
        self.are_arrays = input_data.are_arrays(self._adapter)
        self.sizes = self._sizes_of_all(strategy)
        self._size = self._num_batches_of_all(uneven_data if training else "pad")
        self._largest_size = self._size
        endless = self._dataset.cardinality() == tf.data.INFINITE_CARDINALITY
        self.may_end = not endless and (self._size is None or self._steps_per_epoch is not None)
        self.num_batches = self._steps_per_epoch or self._size
        if training and self.batch_size is not None and not self.own_rows:
            check_batch_size(self.batch_size, strategy)
        self._needs_full_batch = False
        self._strategy = strategy
        self._iterator: Iterator[Any] | None = None
        # Number of the current pass over the data, and the number of batches that were taken from
        # it before the current epoch.
        self._pass, self._taken, self._in_epoch = -1, 0, False
        # Number of passes that were started without taking a batch: before this epoch, and at its
        # end.
        self._training, self._unused, self._unused_at_end = training, 0, 0
        self._is_reset = False
        self._resume_from: dict[str, Any] | None = None
        weakref.finalize(self, input_data.stop_workers, self._adapter)

    def _sizes_of_all(self, strategy: Strategy) -> list[int] | None:
        """Returns the known sizes of the workers' datasets. All workers must call it."""
        if not self.own_rows:
            return None
        size = self._adapter.num_batches
        sizes = strategy.group.gather([-1 if size is None else size])[:, 0].astype(int).tolist()
        return sizes if min(sizes) >= 0 else None

    def _num_batches_of_all(self, uneven_data: UnevenData) -> int | None:
        """Returns the number of batches per epoch, from the shortest or longest dataset."""
        if not self.own_rows:
            return self._adapter.num_batches
        if self.sizes is None:
            return None
        if uneven_data == "refuse" and len(set(self.sizes)) > 1 and self._steps_per_epoch is None:
            raise DataError(uneven_message(self.sizes))
        return min(self.sizes) if uneven_data == "stop" else max(self.sizes)

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes of a global batch, as `tf.TensorSpec`s."""
        return tf.nest.map_structure(
            lambda spec: spec if hasattr(spec, "shape") else None, self._dataset.element_spec
        )

    def _distribute(self, dataset: tf.data.Dataset) -> Any:
        ahead = not input_data.is_read_ahead(self._adapter)  # more would be lost for the next loop
        in_parts = self._steps_per_epoch is not None and not isinstance(self._order, NumberedOrder)
        if in_parts and not input_data.has_iterator_state(dataset):  # reading may have effects
            # As many batches ahead as TensorFlow reads for Keras.
            dataset, ahead = prefetched(dataset, ()), False
        return self._strategy.feed.distribute(
            dataset, self.own_rows, self._needs_full_batch, ahead, self.check_data
        )

    def first_batch(self) -> Any:
        """Returns the first global batch, without consuming it."""
        if (known := input_data.first_batch(self._adapter)) is not None:
            return known
        with self.naming_records(0, 1):
            batch = self._order.first_batch()
        if batch is None:
            raise DataError(_EMPTY)
        return without_optionals(batch)

    @contextlib.contextmanager
    def naming_records(self, step: int, num_steps: int) -> Iterator[None]:
        """Lets an error in some steps of the epoch name the record that cannot be read."""
        try:
            yield
        except (DataError, tf.errors.OpError) as error:
            batch = self._taken + step
            if problem := self._order.problem(max(self._pass, 0), batch, num_steps):
                raise DataError(problem) from error
            raise

    def restart(self) -> None:
        """Starts from the beginning of the data, as Keras does for each evaluation."""
        input_data.end_epoch(self._adapter)
        self._iterator = None
        if self._resume_from and self._resume_from["within pass"]:
            self._order.skip_pass()
            self._resume_from = None

    def begin_epoch(self, step: int = 0, needs_full_batch: bool = False) -> Iterator[Any]:
        """Returns the iterator of an epoch: a new one, or with `steps_per_epoch` the previous one.

        Args:
            step: First step of the epoch; not 0 after a `restore` within an epoch.
            needs_full_batch: Whether every replica gets full batches; the same in all epochs.
        """
        self._needs_full_batch = needs_full_batch
        self._reset_for_fit()
        input_data.begin_epoch(self._adapter)
        if self._largest_size is not None and not self.own_rows:
            self._size = min(self._largest_size or 0, self._adapter.num_batches)  # a PyDataset's
        self._in_epoch = True
        self._unused, self._unused_at_end = self._unused + self._unused_at_end, 0
        saved, self._resume_from = self._resume_from, None
        if saved and saved["within pass"]:
            self._pass, self._taken = saved["pass"], saved["batch"] - step
            position = self._pass, saved["batch"], saved["iterator"]
            self._iterator = self._order.begin(self._distribute, *position)
        elif self._iterator is None or self._steps_per_epoch is None:
            self._pass, self._taken = self._pass + 1, 0
            self._iterator = self._order.begin(self._distribute, self._pass)
        return self._iterator

    def _reset_for_fit(self) -> None:
        """Notifies a PyDataset of an epoch's end before the first epoch, as `fit` does."""
        if self._training and not self._is_reset:
            self._is_reset = True
            input_data.end_epoch(self._adapter)

    def state(self, step: int) -> dict[str, Any]:
        """Returns the resume position in the data, in global batches."""
        within_pass = step > 0 or (self._iterator is not None and self._steps_per_epoch is not None)
        taken = self._taken + (step if self._in_epoch else 0)
        batch = taken if within_pass else 0
        state = None
        if within_pass and self._strategy.group.size == 1:
            state = self._order.state_of(self._iterator)
        position = {
            "pass": self._pass,
            "batch": batch,
            "within pass": within_pass,
            "iterator": state,
            "size": self._size,
        }
        unused = self._unused + (self._unused_at_end if step == 0 else 0)
        return {**position, "unused passes": unused, "order": self._order.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the `state` of another handler of the same data."""
        within_pass, self._unused = state["within pass"], state["unused passes"]
        self._order.restore(state["order"])
        if self._largest_size is None:
            self._size = state["size"]
        self._reset_for_fit()
        for _ in range(state["pass"] + (not within_pass)):
            if not self._training:  # `restart`
                self._adapter.on_epoch_end()
            self._adapter.on_epoch_begin()
            self._order.skip_pass()
            self._adapter.on_epoch_end()
        for _ in range(self._unused):
            self._order.begin_unused()
        self._pass, self._iterator = state["pass"], None
        self._resume_from = state

    def num_left(self, num_done: int, requested: int, at_once: int = 1) -> int:
        """Returns how many of the `requested` steps an epoch has left after `num_done` steps.

        Args:
            num_done: Number of completed steps of the epoch.
            requested: Number of steps of the next call.
            at_once: The number of steps is rounded up to a multiple of it, if there is enough data;
                see `StepsPerCall.at_once`.
        """
        left = requested
        if self.num_batches is not None:
            left = min(requested, -(-self.num_batches // at_once) * at_once - num_done)
        return left if self._size is None else min(left, self._size - self._taken - num_done)

    def discard_iterator(self) -> None:
        """Deletes the iterator in a thread, after the Python functions that it is calling.

        The interpreter waits for this thread before it ends. Deleted later, the iterator would wait
        forever for Python functions in its own threads.
        """
        iterators, self._iterator = [self._iterator], None
        threading.Thread(target=iterators.clear).start()

    def end_epoch(
        self, num_done: int, exhausted: bool, stopped: bool = False, at_once: int = 1
    ) -> None:
        """Records how many batches an epoch took, and whether the data ended.

        If the data ended and its size is known, Keras's `fit` starts the next pass immediately.
        After the remainder of a pass, an epoch continues with the next pass; every other epoch
        starts a new pass. Keras takes the size of the first pass for that of the others.

        Raises:
            DataError: The data has no batches.
        """
        self._taken, self._in_epoch = self._taken + num_done, False
        if self._taken == 0 and (exhausted or self.num_batches == 0):
            raise DataError(_EMPTY)
        is_end = exhausted or (self._size is not None and self._taken >= self._size)
        if is_end and self._steps_per_epoch and num_done < self._steps_per_epoch:
            warnings.warn(
                f"The data ended after {num_done} of {self._steps_per_epoch} steps of this epoch. "
                "Use .repeat() on the dataset, or a smaller steps_per_epoch.",
                stacklevel=3,
            )
        if exhausted and self._training and self._largest_size is None:
            counted = -(-self._taken // at_once) * at_once
            exhausted = self._size is None or counted < self._size
            # Keras counts the call that finds no batch.
            self._size = self._size or counted + at_once
        if is_end:
            self._iterator = None
        if is_end and not exhausted and not stopped:
            if self._training and self._steps_per_epoch is not None:
                self._order.begin_ahead(self._distribute)
            else:
                self._order.begin_unused()
                self._unused_at_end = 1
        input_data.end_epoch(self._adapter)


class Given(NamedTuple):
    """A global batch in memory, in the place of an iterator that yields only this batch."""

    batch: Any
    feed: Feed
    is_whole: bool  # whether every replica gets the full batch

    def get_next(self) -> Element:
        return self.feed.split(self.batch, own_rows=False, whole=self.is_whole)

    def __next__(self) -> Element:
        return self.get_next()


class OneBatch(DataHandler):
    """Inputs, labels and sample weights in memory, as `train_on_batch` gets them."""

    def __init__(self, strategy: Strategy, *parts: Any) -> None:
        while parts[-1] is None:
            parts = parts[:-1]
        self._strategy = strategy
        self._batch = keras.tree.map_structure(input_data.as_tensor, parts)
        self.own_rows = self.may_end = False
        self.uneven_data, self.check_data = "pad", "full"

    @property
    def element_spec(self) -> Any:
        def of_any_size(leaf: Any) -> Any:
            if isinstance(leaf, tf.Tensor) and leaf.shape.rank:
                return tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)
            return leaf if leaf is None else tf.type_spec_from_value(leaf)

        return keras.tree.map_structure(of_any_size, self._batch)

    def first_batch(self) -> Any:
        return self._batch

    def begin_epoch(self, step: int = 0, needs_full_batch: bool = False) -> Iterator[Any]:
        return Given(self._batch, self._strategy.feed, needs_full_batch)


def uneven_message(counts: Sequence[int]) -> str:
    """Returns the error about workers with different numbers of batches."""
    return (
        f"The workers have {', '.join(map(str, counts))} batches, by rank, and uneven_data is "
        "'refuse'. Provide the same number of batches on every worker, or use 'stop' (end the "
        "epoch with the first worker's data) or 'pad' (the other workers continue)."
    )


def check_batch_size(batch_size: int, strategy: Strategy) -> None:
    """Warns if a global batch has fewer rows than there are replicas."""
    if batch_size < strategy.num_replicas:
        units, remedy = strategy.feed.shares_are
        warnings.warn(
            f"A global batch of {batch_size} rows is smaller than the number of {units} "
            f"({strategy.num_replicas}), so some are idle. The results match one device, but for "
            f"speed use batch_size={strategy.num_replicas} or more, or fewer {remedy}.",
            stacklevel=3,
        )


class ValidationData:
    """The validation data of one `fit`, which Keras reads from its first evaluation on.

    Attributes:
        handlers: The data handler; none before its first use if reading may have effects.
    """

    def __init__(self, strategy: Strategy, x: Any, **options: Any) -> None:
        self._make = functools.partial(DataHandler, strategy, x, **options)
        self.handlers: list[DataHandler] = []
        if not isinstance(x, (keras.utils.PyDataset, types.GeneratorType)):
            self.handler()  # raises an error about the data before training

    def handler(self) -> DataHandler:
        """Returns the data handler. All workers must call it."""
        if not self.handlers:
            self.handlers.append(self._make())
        return self.handlers[0]


#: Global batch sizes, by the first epoch (from 0) that uses them.
BatchSizes = Mapping[int, int]


class EpochDataHandlers:
    """A `DataHandler` for each batch size of a `fit`, over the same data.

    Training with several batch sizes gives the same results as several calls of `fit`, each with
    its batch size and `initial_epoch`. A `tf.data.Dataset` is rebatched, and otherwise not changed.
    For increasing batch sizes, see Smith et al. 2018, "Don't Decay the Learning Rate, Increase the
    Batch Size".

    Attributes:
        batch_size: The batch size for validation, if it does not set its own.

    Raises:
        ConfigurationError: The sizes are invalid, or combined with `steps_per_epoch`.
        DataError: The data cannot be rebatched, and as in `DataHandler`.
    """

    def __init__(
        self, strategy: Strategy, x: Any, batch_sizes: int | BatchSizes | None, **options: Any
    ) -> None:
        if not isinstance(batch_sizes, Mapping):
            self.batch_size = batch_sizes
            self._handlers = {0: DataHandler(strategy, x, batch_size=batch_sizes, **options)}
            return
        is_dataset = isinstance(x, tf.data.Dataset)
        self.batch_size = None if is_dataset else max(batch_sizes.values(), default=None)
        _check(batch_sizes, options.get("steps_per_epoch"))
        check_batch_size(min(batch_sizes.values()), strategy)
        by_size: dict[int, DataHandler] = {}
        for size in batch_sizes.values():
            if isinstance(x, tf.data.Dataset):
                by_size[size] = DataHandler(strategy, x.rebatch(size), **options)
            elif callable(x) or not all(hasattr(leaf, "shape") for leaf in tf.nest.flatten(x)):
                raise DataError(
                    "batch_size by epoch needs arrays or a tf.data.Dataset, got "
                    f"{type(x).__name__}. Call fit once for each batch size, with initial_epoch."
                )
            else:
                by_size[size] = DataHandler(strategy, x, batch_size=size, **options)
        self._handlers = {epoch: by_size[batch_sizes[epoch]] for epoch in sorted(batch_sizes)}

    def of_epoch(self, number: int) -> DataHandler:
        """Returns the data of an epoch, counted from 0."""
        return self._handlers[max(epoch for epoch in self._handlers if epoch <= number)]

    def all(self) -> list[DataHandler]:
        """Returns all data handlers, in the order of their epochs."""
        return list(self._handlers.values())


def _check(batch_sizes: BatchSizes, steps_per_epoch: int | None) -> None:
    are_ints = all(isinstance(n, int) for pair in batch_sizes.items() for n in pair)
    if (
        not are_ints
        or 0 not in batch_sizes
        or min(batch_sizes) < 0
        or min(batch_sizes.values()) < 1
    ):
        raise ConfigurationError(
            f"batch_size={dict(batch_sizes)}: expected sizes of at least 1 by first epoch, with a "
            "size for epoch 0, like {0: 32, 5: 64}."
        )
    if steps_per_epoch is not None:
        raise ConfigurationError(
            "batch_size by epoch cannot be combined with steps_per_epoch. Remove one of them."
        )


def limited_epochs(epochs: int) -> int:
    """Returns a number of epochs, at most `keras.config.max_epochs()`."""
    return _limited("epochs", epochs, "max_epochs") or epochs


def limited_steps_per_epoch(steps: int | None) -> int | None:
    """Returns a number of steps, at most `keras.config.max_steps_per_epoch()`.

    Args:
        steps: The number; None for all data.

    Raises:
        ConfigurationError: The number is negative.
    """
    if steps is not None and steps < 0:
        raise ConfigurationError(
            f"{steps} steps per epoch: expected a positive number, or None to use all of the data."
        )
    return _limited("steps_per_epoch", steps, "max_steps_per_epoch")


def _limited(what: str, number: int | None, limited_by: str) -> int | None:
    limit = next((limit() for limit in existing(keras.config, limited_by)), None)
    if not limit or (number is not None and number <= limit):
        return number
    warnings.warn(f"Limiting {what} to {limit}, as set in keras.config.", stacklevel=5)
    return limit
