"""Private names of Keras's data adapters, callbacks and training loop."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from tfdist.upstream.patching import replaced
from tfdist.upstream.tensorflow import seed_of_process


def data_adapter(x: Any, **options: Any) -> Any:
    """Returns what reads any data that `fit` takes, and gives them as a `tf.data.Dataset`.

    `keras.src.trainers.data_adapters.get_data_adapter`, since our `fit` takes the same data.

    Raises:
        ValueError, TypeError: Data of no kind that Keras knows, or that contradict each other.
    """
    return data_adapters.get_data_adapter(x=x, **options)


@dataclass
class Shuffle:
    """How arrays are put in order.

    Attributes:
        seed: What the order follows from.
        as_keras: Whether it is the order that Keras makes of this seed, the same in each pass.
        number: Returns the number of a pass that begins.
    """

    seed: int
    as_keras: bool
    number: Callable[[], int]

    @classmethod
    def of_this_process(cls, number: Callable[[], int]) -> Shuffle:
        """Returns that of the seed which was set; where none was, one is drawn."""
        seed = seed_of_process()
        drawn = int.from_bytes(os.urandom(4), "big") >> 1
        return cls(drawn if seed is None else seed, seed is not None, number)

    def __call__(self, plain: Callable[[Any], Any], value: tf.Tensor) -> tf.Tensor:
        """Returns a tensor of numbers in that order; called in a graph, by Keras's adapter.

        Args:
            plain: `tf.random.shuffle`.
            value: Rows, int64: all, or those of a batch.
        """
        if self.as_keras:
            tf.compat.v1.get_default_graph().seed = self.seed
            return plain(value)
        number = tf.ensure_shape(tf.numpy_function(self.number, [], tf.int64), ())
        pair = tf.stack([tf.constant(self.seed, tf.int64), number])
        pair = tf.random.experimental.stateless_fold_in(pair, value[0])
        return tf.random.experimental.stateless_shuffle(value, pair)


def are_arrays(adapter: Any) -> bool:
    """Tells whether data are arrays: read by an `ArrayDataAdapter`."""
    return isinstance(adapter, ArrayDataAdapter)


def dataset_of_arrays(adapter: Any, shuffle: Shuffle) -> tf.data.Dataset:
    """Returns arrays as a data set, in an order of ours where Keras's adapter shuffles them."""
    with replaced(tf.random, "shuffle", functools.partial(shuffle, tf.random.shuffle)):
        return adapter.get_tf_dataset()


def first_batch(adapter: Any) -> Any:
    """Returns the first batch of data that can be read once only, without taking it; else None.

    `GeneratorDataAdapter._first_batches` are the ones that Keras looked at itself. A PyDataset
    gives its batch by number: its threads, if any, feed one reader at a time.
    """
    if isinstance(adapter, GeneratorDataAdapter):
        return tf.nest.map_structure(_as_tensor, adapter._first_batches[0])
    if isinstance(adapter, PyDatasetAdapter):
        return tf.nest.map_structure(_as_tensor, adapter.py_dataset[0])
    return None


def _as_tensor(leaf: Any) -> Any:
    """Turns a leaf of a batch into what the adapter's data set has of it.

    `scipy_sparse_to_tf_sparse` is what Keras's own adapters do with matrices of SciPy.
    """
    if data_adapter_utils.is_scipy_sparse(leaf):
        return data_adapter_utils.scipy_sparse_to_tf_sparse(leaf)
    is_composite = isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor))
    return leaf if leaf is None or is_composite else tf.convert_to_tensor(leaf)


def begin_epoch(adapter: Any) -> None:
    """Tells data that an epoch begins, as `fit` does.

    A PyDataset without an end keeps its workers from one epoch to the next: batches are read ahead,
    which its `enqueuer` refuses between `on_epoch_end` and `on_epoch_begin`.
    """
    if _keeps_workers(adapter):
        adapter.enqueuer.start()
        adapter.py_dataset.on_epoch_begin()
    else:
        adapter.on_epoch_begin()


def end_epoch(adapter: Any) -> None:
    """Tells data that an epoch has ended, likewise."""
    if _keeps_workers(adapter):
        adapter.py_dataset.on_epoch_end()
    else:
        adapter.on_epoch_end()


def stop_workers(adapter: Any) -> None:
    """Ends the workers of a PyDataset that `end_epoch` has kept."""
    if _keeps_workers(adapter):
        adapter.enqueuer.stop(drain_queue_and_join=False)


def _keeps_workers(adapter: Any) -> bool:
    is_py_dataset = isinstance(adapter, PyDatasetAdapter)
    return is_py_dataset and adapter.enqueuer is not None and adapter.num_batches is None


def train_validation_split(arrays: Any, fraction: float) -> tuple[Any, Any]:
    """Returns the first rows of arrays, and the last `fraction` of them, as `validation_split`.

    `keras.src.trainers.data_adapters.array_slicing`: the same rows as Keras takes.
    """
    return array_slicing.train_validation_split(arrays, validation_split=fraction)


def concatenated(tensors: Sequence[Any]) -> Any:
    """Returns tensors end to end along the rows; of different inner shapes as a ragged one.

    `potentially_ragged_concat`, as in `keras.Model.predict`.
    """
    return trainer.potentially_ragged_concat(tensors)


def as_arrays(structure: Any) -> Any:
    """Returns tensors as NumPy arrays, and ragged and sparse ones as they are.

    `convert_to_np_if_not_ragged`, as in `keras.Model.predict`.
    """
    return keras.tree.map_structure(trainer.convert_to_np_if_not_ragged, structure)


def initial_epoch(model: keras.Model, given: int) -> int:
    """Returns the first epoch, after the callbacks' `on_train_begin`.

    `BackupAndRestore` sets `model._initial_epoch` to the epoch to resume with.
    """
    return model._initial_epoch or given


def is_validated(model: keras.Model, epoch: int, validation_freq: int | Sequence[int]) -> bool:
    """Tells whether an epoch, from 0, ends with a validation: `model._should_eval`."""
    return model._should_eval(epoch, validation_freq)


def in_order_of_metrics(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Returns logs as `evaluate` does without `return_dict`: `model._flatten_metrics_in_order`."""
    return model._flatten_metrics_in_order(logs)


def profiles_batches(board: keras.callbacks.TensorBoard) -> bool:
    """Tells whether a TensorBoard is to profile batches, which it keeps as `_should_trace`."""
    return bool(board._should_trace)


def set_initial_epoch(model: keras.Model, epoch: int) -> None:
    """Sets the epoch to resume with, as `BackupAndRestore` does; 0: the one passed to `fit`."""
    model._initial_epoch = epoch or None
