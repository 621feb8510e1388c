"""Data sets of TensorFlow: their state, their order, and elements for several devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops, prefetch_op

#: `tf.data.experimental.ExternalStatePolicy.FAIL`, as operations take it.
_FAIL_IF_STATEFUL = 2


def is_reshuffled(dataset: tf.data.Dataset) -> bool:
    """Tells whether each iteration has an order of its own, so that a look would change the next.

    `DatasetV2._inputs`, and `_reshuffle_each_iteration` of those that `shuffle` makes.
    """
    again = getattr(dataset, "_reshuffle_each_iteration", False)
    return again is not False or any(map(is_reshuffled, dataset._inputs()))


def is_prefetched(dataset: tf.data.Dataset) -> bool:
    """Tells whether a data set is what `prefetch` returned: `prefetch_op._PrefetchDataset`."""
    return isinstance(dataset, prefetch_op._PrefetchDataset)


def iterator_state(iterator: Any) -> tf.Tensor | None:
    """Returns the state of an iterator of `tf.data`, buffers included, or None where it has none.

    Its `_iterator_resource`: `tf.train.Checkpoint` would write a file at once, and leaves out of
    its state what draws numbers or calls Python without a word.

    Returns:
        For `set_iterator_state`; of dtype variant.
    """
    if (resource := getattr(iterator, "_iterator_resource", None)) is None:
        return None  # of several devices
    try:
        return tf.raw_ops.SerializeIterator(
            resource_handle=resource, external_state_policy=_FAIL_IF_STATEFUL
        )
    except tf.errors.OpError:
        return None


def set_iterator_state(iterator: Any, state: tf.Tensor) -> None:
    """Gives an iterator the state of another one over the same data set.

    Raises:
        tf.errors.OpError: They do not go together.
    """
    tf.raw_ops.DeserializeIterator(resource_handle=iterator._iterator_resource, serialized=state)


def has_iterator_state(dataset: tf.data.Dataset) -> bool:
    """Tells whether iterators over a data set have a state that can be saved."""
    try:
        tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            external_state_policy=_FAIL_IF_STATEFUL,
        )
    except tf.errors.OpError:
        return False
    return True


class OnDevices:
    """A data set whose consecutive elements are copied ahead of time to consecutive devices.

    An element of an iterator is a list with one element per device. Unlike the iterator of
    `tf.distribute`, this one keeps a batch on its device where it looks for the end of the data:
    `DistributedIterator.get_next_as_optional` puts the batches of all devices into one Optional in
    host memory, and sums over all workers how many of them have data.

    Args:
        dataset: The number of its elements is a multiple of the number of devices.
        devices: TensorFlow's full names, of one host.
    """

    def __init__(self, dataset: tf.data.Dataset, devices: Sequence[str]) -> None:
        self._dataset, self._devices = dataset, list(devices)
        first = tf.DeviceSpec.from_string(devices[0])
        self._host = first.replace(device_type="CPU", device_index=0).to_string()
        self.element_spec = dataset.element_spec

    def __iter__(self) -> IteratorOnDevices:
        return IteratorOnDevices(self._dataset, self._devices, source_device=self._host)


class IteratorOnDevices(multi_device_iterator_ops.OwnedMultiDeviceIterator):
    """An iterator of `OnDevices`, which functions of TensorFlow can take."""

    def get_next(self, device: str | None = None) -> Any:
        """Returns the next element of each device, or that of one device."""
        if device is not None:
            return _placed(super().get_next(device), device)
        return [*map(_placed, super().get_next(), self._devices)]

    def get_next_as_optional(self) -> OptionalOnDevices:
        """Returns the next elements, or the end of the data."""
        return OptionalOnDevices(super().get_next_as_optional(), self._devices)

    @property
    def _type_spec(self) -> tf.TypeSpec:
        return _SpecOnDevices(self._devices, self._source_device, self._element_spec)


class OptionalOnDevices:
    """The Optionals of several devices, which all have a value or all have none.

    Args:
        optionals: One per device.
        devices: Their names.
    """

    def __init__(
        self, optionals: Sequence[tf.experimental.Optional], devices: Sequence[str]
    ) -> None:
        self._optionals, self._devices = optionals, devices

    def has_value(self) -> tf.Tensor:
        """Returns whether there are elements; a bool scalar."""
        with tf.device(self._devices[0]):
            return self._optionals[0].has_value()

    def get_value(self) -> list[Any]:
        """Returns the element of each device, there."""
        values = (optional.get_value() for optional in self._optionals)
        return [*map(_placed, values, self._devices)]


def _placed(element: Any, device: str) -> Any:
    """Returns an element whose tensors name their device.

    What an iterator returns is only colocated with it: functions that take such a tensor, and loops
    that keep it, would do so on the default device.
    """
    with tf.device(device):
        return tf.nest.map_structure(tf.identity, element, expand_composites=True)


class _SpecOnDevices(multi_device_iterator_ops.MultiDeviceIteratorSpec):
    """The type of an `IteratorOnDevices`: `MultiDeviceIteratorSpec` makes a plain one."""

    @property
    def value_type(self) -> type:
        return IteratorOnDevices

    def _from_components(self, components: Any) -> IteratorOnDevices:
        return IteratorOnDevices(
            devices=self._devices,
            source_device=self._source_device,
            components=components,
            element_spec=self._element_spec,
        )
