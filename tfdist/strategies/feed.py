"""Feeds global batches to the replicas of a process: splits them and counts rows of all workers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.groups.base import ProcessGroup
from tfdist.strategies import batches, inner_loop
from tfdist.strategies.batches import Batch, CheckData, Element, Share, num_rows
from tfdist.upstream.input_data import OnDevices, is_prefetched

#: If the data of one worker end before those of others: the epoch ends, too (`"stop"`), the others
#: continue (`"pad"`), or it is an error (`"refuse"`).
UnevenData = Literal["stop", "pad", "refuse"]


class Feed:
    """The data of one process, and the loop that takes steps on it.

    Attributes:
        num_shares: Number of per-replica batches of this process.
        shares_are: For messages: what computes a per-replica batch, and which option sets how many
            there are.

    Args:
        devices: Names of the devices of this process.
        group: The processes that train together.
        num_shares: The number of replicas of this process; None: one for each device.
        shares_are: As the attribute.
    """

    def __init__(
        self,
        devices: Sequence[str],
        group: ProcessGroup,
        num_shares: int | None = None,
        shares_are: tuple[str, str] = ("replicas", "devices"),
    ) -> None:
        self._devices, self._group = list(devices), group
        self.num_shares = len(devices) if num_shares is None else num_shares
        self.shares_are = shares_are

    @property
    def _num_shares_of_all(self) -> int:
        return self.num_shares * self._group.size

    @property
    def on_devices(self) -> bool:
        """Whether batches are read ahead into the memory of the devices that compute."""
        return len(self._devices) == 1

    def input_context(self) -> tf.distribute.InputContext:
        """Returns the argument of a function that makes this process's data set."""
        group = self._group
        return tf.distribute.InputContext(group.size, group.rank, self._num_shares_of_all)

    def distribute(
        self,
        dataset: tf.data.Dataset,
        own_rows: bool = False,
        whole: bool = False,
        ahead: bool = True,
        check_data: CheckData = "full",
    ) -> Any:
        """Turns a data set of batches into one of elements that `unpack` accepts.

        Args:
            dataset: A data set of global batches, the same in all processes.
            own_rows: Whether the batches are this process's rows of the global batches instead. The
                result is then infinite: batches without rows follow the data.
            whole: Whether every replica gets the full batch and computes it as one device does.
            ahead: Whether to read batches before the steps that use them.
            check_data: How much of the global batches the processes compare.

        Raises:
            UnsupportedModelError: `whole` is set, but no process has the full batch.
        """
        if own_rows and self._group.size > 1:
            if whole:
                raise UnsupportedModelError(
                    "This model needs full batches, but every worker reads its own rows: pass a "
                    "data set of the global batches, the same on every worker, not a function."
                )
            dataset = dataset.concatenate(without_rows(dataset.element_spec).repeat())
        if self._num_shares_of_all == 1 and is_plain(dataset):
            # A function of `tf.data` that splits nothing would cost more than a tiny network's
            # step.
            return prefetched(dataset, self._devices) if ahead else dataset
        split = functools.partial(self.split, own_rows=own_rows, whole=whole, check_data=check_data)
        return distributed(dataset, split, self._devices, ahead)

    def split(
        self, batch: Batch, own_rows: bool, whole: bool = False, check_data: CheckData = "full"
    ) -> Element:
        """Returns an element of a distributed data set; called in a graph of `tf.data`."""
        num_local, several = self.num_shares, self._group.size > 1
        rows = num_rows(batch)
        with inner_loop.on_host():  # where the loop counts
            checksum = tf.constant(0, tf.int64)
        if several and (whole or not own_rows):
            checksum = batches.checksum(batch, check_data)
        if whole:
            shares = (Share(rows, batch),) * num_local
        elif several and own_rows:
            shares = batches.split(batches.pad_to_one_row(batch), num_local, range(num_local), rows)
            far = tf.constant(self._group.rank * batches.OWN_ROWS_APART, tf.int64)
            shares = tuple(s._replace(first_row=far + s.first_row) for s in shares)
        else:
            first = num_local * self._group.rank
            shares = batches.split(batch, self._num_shares_of_all, range(first, first + num_local))
        return Element(rows, checksum, shares)

    def unpack(self, element: Any) -> Element:
        """Returns an element of a distributed data set with its per-replica batches."""
        if isinstance(element, Element):
            return element
        return self.split(element, own_rows=False)

    def received(self, raw: Any, own_rows: bool, uneven_data: UnevenData = "pad") -> Element:
        """Returns an element with the rows of the global batch; called by every process.

        Args:
            raw: What the iterator of a distributed data set returned.
            own_rows: As for `distribute`.
            uneven_data: Unless it is `"pad"`, the global batch has no rows if one process has none.
        """
        element = self.unpack(raw)
        if not own_rows or self._group.size == 1:
            return element
        if uneven_data == "pad":
            return element._replace(num_rows=self._group.all_reduce([element.num_rows])[0])
        counts = tf.stack([element.num_rows, tf.cast(element.num_rows == 0, tf.int32)])
        rows, num_ended = tf.unstack(self._group.all_reduce([counts])[0])
        return element._replace(num_rows=tf.where(num_ended > 0, 0, rows))

    def compile(
        self,
        step: inner_loop.Step,
        loop: inner_loop.Loop = inner_loop.in_graph,
        may_end: bool = True,
        own_rows: bool = False,
        uneven_data: UnevenData = "pad",
    ) -> inner_loop.LoopFn:
        """Returns a function that makes steps.

        Args:
            step: Called outside of the replicas, once for each global batch.
            loop: Makes the function.
            may_end: Whether the data may end before the requested number of steps.
            own_rows: As for `distribute`.
            uneven_data: Where the loop ends if processes have rows of their own, and one has fewer
                batches.
        """
        several = self._group.size > 1
        if own_rows and several:
            receive = functools.partial(self.received, own_rows=True, uneven_data=uneven_data)
            return loop(receive, step, inner_loop.End.WITHOUT_ROWS, several)
        end = inner_loop.End.OF_ITERATOR if may_end else None
        return loop(self.unpack, step, end, several)


class DevicePrefetch(Feed):
    """Per-replica batches that are copied to the replicas' devices ahead of the step."""

    on_devices = True

    def __init__(self, devices: Sequence[str], group: ProcessGroup, places: Sequence[str]) -> None:
        super().__init__(devices, group)
        self._places = list(places)

    def distribute(
        self,
        dataset: tf.data.Dataset,
        own_rows: bool = False,
        whole: bool = False,
        ahead: bool = True,
        check_data: CheckData = "full",
    ) -> Any:
        elements = super().distribute(dataset, own_rows, whole, ahead, check_data)
        if not ahead:
            return elements

        def one_by_one(element: Element) -> tf.data.Dataset:
            first, *others = (
                tf.data.Dataset.from_tensors((_as_shape(element, share), share.rows))
                for share in element.shares
            )
            return functools.reduce(tf.data.Dataset.concatenate, others, first)

        by_replica = elements.flat_map(one_by_one).prefetch(tf.data.AUTOTUNE)
        return OnDevices(by_replica, self._places)

    def unpack(self, element: Any) -> Element:
        if isinstance(element, Element):
            return element
        numbers = [_from_shape(empty) for empty, _ in element]
        (total_rows, checksum, *_), *_ = numbers
        shares = [
            Share(num_rows, rows, first_row)
            for (*_, num_rows, first_row), (_, rows) in zip(numbers, element, strict=True)
        ]
        return Element(total_rows, checksum, shares)


def _as_shape(element: Element, share: Share) -> tf.Tensor:
    """Returns a tensor without elements whose shape holds all numbers of a per-replica batch.

    A GPU's iterator copies numbers to the GPU, and a step needs them on the host, which would have
    to wait for the GPU to copy them back. A shape is in host memory.
    """
    numbers = [0, element.num_rows, element.checksum, share.num_rows, share.first_row]
    return tf.zeros(tf.stack([tf.cast(number, tf.int64) for number in numbers]), tf.uint8)


def _from_shape(empty: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """Returns what `_as_shape` was called with: rows, checksum, the replica's rows, the first."""
    shape = tf.shape(empty, tf.int64)
    with tf.device("CPU:0"):
        _, total_rows, checksum, num_rows, first_row = tf.unstack(shape, num=5)
        return tf.cast(total_rows, tf.int32), checksum, tf.cast(num_rows, tf.int32), first_row


# ---- data sets ----


def distributed(
    dataset: tf.data.Dataset,
    split: Callable[[Batch], Element],
    devices: Sequence[str],
    ahead: bool = True,
) -> tf.data.Dataset:
    """Returns a data set of elements, which are prepared ahead of the steps."""
    # `tf.data` unpacks a tuple, including one with a single part: several inputs without labels.
    is_tuple = isinstance(dataset.element_spec, tuple)

    def element(*batch: Batch) -> Element:
        return split(without_optionals(batch if is_tuple else batch[0]))

    # Nothing in it needs AutoGraph, whose conversion takes about as long as the tracing.
    convert = tf.autograph.experimental.do_not_convert
    if not ahead:
        return dataset.map(convert(element))
    return prefetched(dataset.map(convert(element), tf.data.AUTOTUNE, deterministic=True), devices)


def prefetched(dataset: tf.data.Dataset, devices: Sequence[str]) -> tf.data.Dataset:
    """Returns the data set with its elements read ahead of the steps.

    Args:
        dataset: Any data set.
        devices: The devices of this process, one for each replica. If there is only one and it is a
            GPU, the elements are copied to it ahead of time.
    """
    if len(devices) == 1 and devices[0].startswith("GPU"):
        return dataset.apply(tf.data.experimental.prefetch_to_device(devices[0]))
    # A second buffer behind the user's own makes small steps a tenth slower: one more thread wakes.
    return dataset if is_prefetched(dataset) else dataset.prefetch(tf.data.AUTOTUNE)


def without_rows(element_spec: Any) -> tf.data.Dataset:
    """Returns a data set of one batch of the given shapes and dtypes that has no rows."""

    def empty(spec: Any) -> Any:
        if isinstance(spec, tf.RaggedTensorSpec):
            values = tf.zeros([0, *spec.shape[spec.ragged_rank + 1 :]], spec.dtype)
            return tf.RaggedTensor.from_nested_row_lengths(
                values, [tf.zeros([0], spec.row_splits_dtype)] * spec.ragged_rank
            )
        if isinstance(spec, tf.SparseTensorSpec):
            return tf.sparse.from_dense(tf.zeros([0, *spec.shape[1:]], spec.dtype))
        if spec.shape.rank == 0:
            return tf.zeros([], spec.dtype)
        return tf.zeros([0, *(size or 1 for size in spec.shape[1:])], spec.dtype)

    return tf.data.Dataset.from_tensors(tf.nest.map_structure(empty, element_spec))


def is_plain(dataset: tf.data.Dataset) -> bool:
    """Returns whether a data set has no Optionals, which stand for None."""
    return not any(
        isinstance(spec, tf.OptionalSpec) for spec in tf.nest.flatten(dataset.element_spec)
    )


def without_optionals(batch: Batch) -> Batch:
    """Replaces the empty Optionals that Keras's generator adapter yields with None."""
    return tf.nest.map_structure(
        lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, batch
    )
