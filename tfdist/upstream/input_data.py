"""Private names of Keras's data adapters and of `tf.data`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from tensorflow.python.data.ops import dataset_ops, multi_device_iterator_ops, prefetch_op

import pipelines
from tfdist.upstream.patching import replaced
from tfdist.upstream.tensorflow_runtime import seed_of_process


def data_adapter(x: Any, **options: Any) -> Any:
    """Returns Keras's adapter for any data that `fit` accepts, which makes a `tf.data.Dataset`.

    `keras.src.trainers.data_adapters.get_data_adapter`: `Trainer.fit` accepts the same data.

    Raises:
        ValueError, TypeError: Keras does not support the data, or they contradict each other.
    """
    return data_adapters.get_data_adapter(x=x, **options)


@dataclass
class Shuffle:
    """How arrays are shuffled.

    Attributes:
        seed: The seed of the order.
        as_keras: Whether to use Keras's order for this seed, which is the same in each pass.
        number: Returns the number of the pass that begins.
    """

    seed: int
    as_keras: bool
    number: Callable[[], int]

    @classmethod
    def of_this_process(cls, number: Callable[[], int]) -> Shuffle:
        """Returns the shuffle of the seed that the user set, or of a random seed."""
        seed = seed_of_process()
        drawn = int.from_bytes(os.urandom(4), "big") >> 1
        return cls(drawn if seed is None else seed, seed is not None, number)

    def __call__(self, plain: Callable[[Any], Any], value: tf.Tensor) -> tf.Tensor:
        """Returns row numbers in the shuffled order; Keras's adapter calls it in a graph.

        Args:
            plain: `tf.random.shuffle`.
            value: Row numbers, int64: all, or those of a batch.
        """
        if self.as_keras:
            tf.compat.v1.get_default_graph().seed = self.seed
            return plain(value)
        number = tf.ensure_shape(tf.numpy_function(self.number, [], tf.int64), ())
        pair = tf.stack([tf.constant(self.seed, tf.int64), number])
        pair = tf.random.experimental.stateless_fold_in(pair, value[0])
        return tf.random.experimental.stateless_shuffle(value, pair)


def are_arrays(adapter: Any) -> bool:
    """Returns whether an `ArrayDataAdapter` reads the data."""
    return isinstance(adapter, ArrayDataAdapter)


def dataset_of(adapter: Any) -> tf.data.Dataset:
    """Returns an adapter's data set of batches, without autotuning unless the user chose it.

    Keras reads the first batches of a PyDataset for their shapes, `get_tensor_spec`, and again in
    the first pass. They are kept for `first_batch`, because reading may draw random numbers.
    """
    of_batches = data_adapter_utils.get_tensor_spec

    def spec(batches: list[Any]) -> Any:
        adapter._first_batches = batches
        return of_batches(batches)

    with replaced(data_adapter_utils, "get_tensor_spec", spec):
        dataset = adapter.get_tf_dataset()
    is_chosen = dataset.options().autotune != tf.data.Options().autotune
    return dataset if is_chosen else pipelines.without_autotuning(dataset)


def dataset_of_arrays(adapter: Any, shuffle: Shuffle) -> tf.data.Dataset:
    """Returns arrays as a data set, shuffled by `shuffle` instead of Keras's own order."""
    with replaced(tf.random, "shuffle", functools.partial(shuffle, tf.random.shuffle)):
        return dataset_of(adapter)


def first_batch(adapter: Any) -> Any:
    """Returns the first batch of a generator or PyDataset, which Keras itself has read, or None.

    `GeneratorDataAdapter._first_batches`, and those that `dataset_of` keeps.
    """
    batches = getattr(adapter, "_first_batches", None)
    return None if batches is None else tf.nest.map_structure(as_tensor, batches[0])


def as_tensor(leaf: Any) -> Any:
    """Converts a leaf of a batch as the adapter's data set does.

    Keras's adapters convert SciPy matrices with `scipy_sparse_to_tf_sparse`.
    """
    if data_adapter_utils.is_scipy_sparse(leaf):
        return data_adapter_utils.scipy_sparse_to_tf_sparse(leaf)
    is_composite = isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor))
    return leaf if leaf is None or is_composite else tf.convert_to_tensor(leaf)


def weights_of_classes(y: Any, class_weight: dict[int, float]) -> Any:
    """Returns the sample weights of labels, as `train_on_batch` computes them in Keras."""
    return data_adapter_utils.class_weight_to_sample_weights(y, class_weight)


def begin_epoch(adapter: Any) -> None:
    """Notifies the data that an epoch begins, as `fit` does.

    An endless PyDataset keeps its workers from one epoch to the next: batches are prefetched, which
    its `enqueuer` refuses between `on_epoch_end` and `on_epoch_begin`.
    """
    if _keeps_workers(adapter):
        adapter.enqueuer.start()
        adapter.py_dataset.on_epoch_begin()
    else:
        adapter.on_epoch_begin()


def end_epoch(adapter: Any) -> None:
    """Notifies the data that an epoch has ended, likewise."""
    if _keeps_workers(adapter):
        adapter.py_dataset.on_epoch_end()
    else:
        adapter.on_epoch_end()


def stop_workers(adapter: Any) -> None:
    """Stops the workers of a PyDataset that `end_epoch` kept running."""
    if _keeps_workers(adapter):
        adapter.enqueuer.stop(drain_queue_and_join=False)


def _keeps_workers(adapter: Any) -> bool:
    is_py_dataset = isinstance(adapter, PyDatasetAdapter)
    return is_py_dataset and adapter.enqueuer is not None and adapter.num_batches is None


def train_validation_split(arrays: Any, fraction: float) -> tuple[Any, Any]:
    """Returns the first rows of arrays, and the last `fraction` of them, as `validation_split`.

    `keras.src.trainers.data_adapters.array_slicing`, so that the rows are those that Keras selects.
    """
    return array_slicing.train_validation_split(arrays, validation_split=fraction)


#: The number of `tf.data.experimental.ExternalStatePolicy.FAIL`, for raw operations.
_FAIL_IF_STATEFUL = 2


def is_reshuffled(dataset: tf.data.Dataset) -> bool:
    """Returns whether each iteration has a new order, so that reading a batch changes later ones.

    `DatasetV2._inputs`, and `_reshuffle_each_iteration` of those that `shuffle` makes.
    """
    again = getattr(dataset, "_reshuffle_each_iteration", False)
    return again is not False or any(map(is_reshuffled, dataset._inputs()))


def is_read_ahead(adapter: Any) -> bool:
    """Returns whether Keras's adapter prefetches: a `GeneratorDataAdapter` does."""
    return isinstance(adapter, GeneratorDataAdapter)


def is_prefetched(dataset: tf.data.Dataset) -> bool:
    """Returns whether a data set is the result of `prefetch`, perhaps with other options.

    `prefetch_op._PrefetchDataset`, `dataset_ops._OptionsDataset` and `DatasetV2._inputs`.
    """
    while isinstance(dataset, dataset_ops._OptionsDataset):
        (dataset,) = dataset._inputs()
    return isinstance(dataset, prefetch_op._PrefetchDataset)


def iterator_state(iterator: Any) -> tf.Tensor | None:
    """Returns the state of a `tf.data` iterator, buffers included.

    Uses its `_iterator_resource`: `tf.train.Checkpoint` would write a file at once, and silently
    omits the state of random numbers and of Python functions.

    Returns:
        A tensor of dtype variant for `set_iterator_state`; None if the state cannot be saved.
    """
    if (resource := getattr(iterator, "_iterator_resource", None)) is None:
        return None  # An iterator over several devices has none.
    try:
        return tf.raw_ops.SerializeIterator(
            resource_handle=resource, external_state_policy=_FAIL_IF_STATEFUL
        )
    except tf.errors.OpError:
        return None


def set_iterator_state(iterator: Any, state: tf.Tensor) -> None:
    """Sets the state of an iterator to that of another one over the same data set.

    Raises:
        tf.errors.OpError: The state is of another data set.
    """
    tf.raw_ops.DeserializeIterator(resource_handle=iterator._iterator_resource, serialized=state)


def has_iterator_state(dataset: tf.data.Dataset) -> bool:
    """Returns whether the state of an iterator over a data set can be saved."""
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
        """Returns the elements, each on its device."""
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
