"""Data as Keras takes it, on its way to the replicas, epoch after epoch.

The data of each epoch, where the global batch grows on the way.

What `keras.config` limits for a try of a script: epochs of `fit`, steps of every loop.
"""

from __future__ import annotations

import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import ConfigurationError, DataError
from tfdist.loops.data_order import order_of
from tfdist.strategies.base import Strategy
from tfdist.strategies.batches import without_optionals
from tfdist.upstream import keras_data

_EMPTY = "The data hold no batch: check the data set, its filters and shards."


class DataHandler:
    """Global batches for one `fit`, `evaluate` or `predict`.

    Args:
        strategy: Splits the batches.
        training: Whether a batch smaller than the replicas is an error; evaluating one is none.
        x: What `keras.Model.fit` takes, or a function of a `tf.distribute.InputContext` that
            returns this worker's `tf.data.Dataset`.
        **options: As `keras.Model.fit`: `y`, `sample_weight`, `batch_size` (global),
            `steps_per_epoch`, `shuffle`, `class_weight`.

    Attributes:
        num_batches: Steps of an epoch; None while unknown.
        batch_size: Rows of a global batch; None if unknown.
        may_end: Whether the data may end before as many batches as are asked for.
        own_rows: Whether each worker brings its own rows of the global batches.
        full_batches: Whether every replica is to have whole batches; set before the first epoch.
        source: The data, as they were given.
        are_arrays: Whether they are in memory.

    Raises:
        DataError: No data, or training batches of fewer rows than there are replicas.
    """

    def __init__(self, strategy: Strategy, x: Any, training: bool = False, **options: Any) -> None:
        self.source = x
        if callable(x) and not isinstance(x, tf.data.Dataset):
            x = x(strategy.input_context())
            self.own_rows = True
        else:
            self.own_rows = False
        if isinstance(x, (tf.data.Dataset, types.GeneratorType)):
            options["shuffle"] = False  # they have an order of their own; Keras would warn

        def again(x: Any) -> Any:
            return keras_data.data_adapter(x, **options)

        try:
            self._adapter = again(x)
            self._order = order_of(x, self._adapter, again)
            self._dataset = self._order.dataset
        except (ValueError, TypeError) as error:
            raise DataError(
                f"The data cannot be read: {error}\nPass what keras.Model.fit takes, or a function "
                "of a tf.distribute.InputContext that returns a batched tf.data.Dataset."
            ) from error
        self.batch_size = self._adapter.batch_size
        self.are_arrays = keras_data.are_arrays(self._adapter)
        self._steps_per_epoch = limited_steps_per_epoch(options.get("steps_per_epoch"))
        self._size = self._num_batches_of_all(strategy)
        endless = self._dataset.cardinality() == tf.data.INFINITE_CARDINALITY
        self.may_end = not endless and (self._size is None or self._steps_per_epoch is not None)
        self.num_batches = self._steps_per_epoch or self._size
        if training and self.batch_size is not None and not self.own_rows:
            check_batch_size(self.batch_size, strategy)
        self.full_batches = False
        self._strategy = strategy
        self._iterator: Iterator[Any] | None = None
        # The pass over the data that goes on, and the batches taken of it before the epoch in which
        # they are being taken, if they are.
        self._pass, self._taken, self._in_epoch = -1, 0, False
        # Passes of which nobody took a batch: before the epoch that was begun last, and at its end.
        self._training, self._in_vain, self._in_vain_at_end = training, 0, 0
        self._goes_on: dict[str, Any] | None = None
        weakref.finalize(self, keras_data.stop_workers, self._adapter)

    def _num_batches_of_all(self, strategy: Strategy) -> int | None:
        """Batches of an epoch, where each worker knows its own: as many as the longest has."""
        own = self._adapter.num_batches
        if not self.own_rows:
            return own
        sizes = strategy.gather([-1 if own is None else own])
        return int(sizes.max()) if sizes.min() >= 0 else None

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes of a global batch, as `tf.TensorSpec`."""
        return tf.nest.map_structure(
            lambda spec: spec if hasattr(spec, "shape") else None, self._dataset.element_spec
        )

    def _distribute(self, dataset: tf.data.Dataset) -> Any:
        return self._strategy.distribute(dataset, self.own_rows, self.full_batches)

    def first_batch(self) -> Any:
        """Returns the first global batch without taking it from a generator."""
        if (known := keras_data.first_batch(self._adapter)) is not None:
            return known
        if (batch := self._order.first_batch()) is None:
            raise DataError(_EMPTY)
        return without_optionals(batch)

    def restart(self) -> None:
        """Goes back to the beginning of the data, as Keras does for each evaluation."""
        self._iterator = None
        if self._goes_on and self._goes_on["goes on"]:
            self._order.leave_out()
            self._goes_on = None

    def begin_epoch(self, step: int = 0) -> Iterator[Any]:
        """Returns the iterator of an epoch: a new one, or with `steps_per_epoch` the last one.

        Args:
            step: Of the epoch with which to begin: not 0 where `restore` was within one.
        """
        keras_data.begin_epoch(self._adapter)
        self._in_epoch = True
        self._in_vain, self._in_vain_at_end = self._in_vain + self._in_vain_at_end, 0
        begun, self._goes_on = self._goes_on, None
        if begun and begun["goes on"]:
            self._pass, self._taken = begun["pass"], begun["batch"] - step
            place = self._pass, begun["batch"], begun["iterator"]
            self._iterator = self._order.begin(self._distribute, *place)
        elif self._iterator is None or self._steps_per_epoch is None:
            self._pass, self._taken = self._pass + 1, 0
            self._iterator = self._order.begin(self._distribute, self._pass)
        return self._iterator

    def state(self, step: int) -> dict[str, Any]:
        """Returns where in the data this feed is, in global batches.

        Args:
            step: Steps of the epoch that goes on, or of which the evaluation does; 0: none does.
        """
        goes_on = step > 0 or (self._iterator is not None and self._steps_per_epoch is not None)
        taken = self._taken + (step if self._in_epoch else 0)
        batch = taken if goes_on else 0
        state = None
        if goes_on and self._strategy.num_workers == 1:
            state = self._order.state_of(self._iterator)
        place = {"pass": self._pass, "batch": batch, "goes on": goes_on, "iterator": state}
        in_vain = self._in_vain + (self._in_vain_at_end if step == 0 else 0)
        return {**place, "in vain": in_vain, "order": self._order.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Has the next epoch begin where another feed of the same data was."""
        self._order.restore(state["order"])
        for _ in range(state["pass"] + (not state["goes on"])):
            self._adapter.on_epoch_begin()
            self._order.leave_out()
            self._adapter.on_epoch_end()
        self._in_vain = state.get("in vain", 0)
        for _ in range(self._in_vain):
            self._order.begin_in_vain()
        self._pass, self._iterator, self._goes_on = state["pass"], None, state

    def num_left(self, made: int, wanted: int, at_once: int = 1) -> int:
        """Returns how many of the `wanted` steps an epoch has left after `made` ones.

        Args:
            made: Steps.
            wanted: Steps of a call.
            at_once: So many fill up the last ones, if the data have them: `StepsPerCall.at_once`.
        """
        left = wanted
        if self.num_batches is not None:
            left = min(wanted, -(-self.num_batches // at_once) * at_once - made)
        return left if self._size is None else min(left, self._size - self._taken - made)

    def end_epoch(self, made: int, exhausted: bool, stopped: bool = False) -> None:
        """Notes how many batches an epoch took, and whether the data ended in it.

        Where they did, and Keras knew that they would, its `fit` begins the next pass at once: an
        epoch that takes what is left of a pass goes on with it, every other one begins its own.

        Args:
            made: Batches.
            exhausted: Whether there was none left.
            stopped: Whether a callback ended the epoch.
        """
        self._taken, self._in_epoch = self._taken + made, False
        if self._taken == 0 and (exhausted or self.num_batches == 0):
            raise DataError(_EMPTY)
        is_end = exhausted or (self._size is not None and self._taken >= self._size)
        if is_end and self._steps_per_epoch and made < self._steps_per_epoch:
            warnings.warn(
                f"The data ended after {made} of {self._steps_per_epoch} steps of this epoch: "
                "use .repeat() on the data set, or a smaller steps_per_epoch.",
                stacklevel=3,
            )
        if is_end:
            self._iterator = None
        if is_end and not exhausted and not stopped:
            if self._training and self._steps_per_epoch is not None:
                self._order.begin_ahead(self._distribute)
            else:
                self._order.begin_in_vain()
                self._in_vain_at_end = 1
        keras_data.end_epoch(self._adapter)


def check_batch_size(batch_size: int, strategy: Strategy) -> None:
    """Checks that a global batch has work for every replica of a strategy.

    Raises:
        DataError: It has fewer rows than there are replicas.
    """
    if batch_size < strategy.num_replicas:
        shares, cure = strategy.shares_are
        raise DataError(
            f"A global batch of {batch_size} rows leaves some of {strategy.num_replicas} {shares} "
            f"without work: use batch_size={strategy.num_replicas} or more, or fewer {cure}."
        )


#: Rows of a global batch by the epoch, from 0, from which on they hold.
BatchSizes = Mapping[int, int]


class EpochDataHandlers:
    """A feed for each size of batch, over the same data.

    Training on them is the same as one `fit` after another, each with its batch size and
    `initial_epoch`. A `tf.data.Dataset` is batched anew, so that it is read, mapped and shuffled as
    it always is. Source of the practice: Smith et al. 2018, "Don't Decay the Learning Rate,
    Increase the Batch Size".

    Args:
        strategy: Splits the batches.
        x: Arrays or a `tf.data.Dataset` of batches.
        batch_sizes: A number, None, or by epoch.
        **options: Of `DataHandler`.

    Attributes:
        batch_size: To evaluate with, in the batches of the training where these are all alike.

    Raises:
        ConfigurationError: The sizes are none, or go with `steps_per_epoch`.
        DataError: The data cannot be batched anew; or as of `DataHandler`.
    """

    def __init__(
        self, strategy: Strategy, x: Any, batch_sizes: int | BatchSizes | None, **options: Any
    ) -> None:
        if not isinstance(batch_sizes, Mapping):
            self.batch_size = batch_sizes
            self._feeds = {0: DataHandler(strategy, x, batch_size=batch_sizes, **options)}
            return
        is_dataset = isinstance(x, tf.data.Dataset)
        self.batch_size = None if is_dataset else max(batch_sizes.values(), default=None)
        _check(batch_sizes, options.get("steps_per_epoch"))
        check_batch_size(min(batch_sizes.values()), strategy)
        make = _batched_anew(strategy, x, options)
        by_size = {size: make(size) for size in batch_sizes.values()}
        self._feeds = {epoch: by_size[batch_sizes[epoch]] for epoch in sorted(batch_sizes)}

    def of_epoch(self, number: int) -> DataHandler:
        """Returns the feed of an epoch, counted from 0."""
        return self._feeds[max(epoch for epoch in self._feeds if epoch <= number)]

    def all(self) -> list[DataHandler]:
        """Returns the feeds, in the order of the epochs that they are for."""
        return list(self._feeds.values())


def _batched_anew(
    strategy: Strategy, x: Any, options: Mapping[str, Any]
) -> Callable[[int], DataHandler]:
    """Returns what makes the feed of a size."""
    if isinstance(x, tf.data.Dataset):
        return lambda size: DataHandler(strategy, x.rebatch(size), **options)
    if callable(x) or not all(hasattr(leaf, "shape") for leaf in tf.nest.flatten(x)):
        raise DataError(
            f"batch_size by epoch takes arrays or a tf.data.Dataset, got {type(x).__name__}: call "
            "fit once for each batch size, with initial_epoch."
        )
    return lambda size: DataHandler(strategy, x, batch_size=size, **options)


def _check(batch_sizes: BatchSizes, steps_per_epoch: int | None) -> None:
    fits = all(isinstance(n, int) for pair in batch_sizes.items() for n in pair)
    if not fits or 0 not in batch_sizes or min(batch_sizes) < 0 or min(batch_sizes.values()) < 1:
        raise ConfigurationError(
            f"batch_size={dict(batch_sizes)}: expected sizes from 1 by epoch, from epoch 0 on, "
            "like {0: 32, 5: 64}."
        )
    if steps_per_epoch is not None:
        raise ConfigurationError(
            "batch_size by epoch takes epochs that are passes over the data: leave "
            "steps_per_epoch out."
        )


def limited_epochs(asked: int) -> int:
    """Returns so many epochs, or `keras.config.max_epochs()` where that is fewer."""
    return _limited("epochs", asked, keras.config.max_epochs()) or asked


def limited_steps_per_epoch(asked: int | None) -> int | None:
    """Returns so many steps, or `keras.config.max_steps_per_epoch()` where that is fewer.

    Args:
        asked: None: as many as the data have.
    """
    return _limited("steps_per_epoch", asked, keras.config.max_steps_per_epoch())


def _limited(what: str, asked: int | None, limit: int | None) -> int | None:
    if not limit or (asked is not None and asked <= limit):
        return asked
    warnings.warn(f"Limiting {what} to {limit}, as keras.config says.", stacklevel=5)
    return limit
