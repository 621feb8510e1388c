"""Private names of Keras's data adapters, callbacks and training loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras.src.backend.tensorflow import trainer
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter


def data_adapter(x: Any, **options: Any) -> Any:
    """Returns what reads any data that `fit` takes, and gives them as a `tf.data.Dataset`.

    `keras.src.trainers.data_adapters.get_data_adapter`, since our `fit` takes the same data.

    Raises:
        ValueError, TypeError: Data of no kind that Keras knows, or that contradict each other.
    """
    return data_adapters.get_data_adapter(x=x, **options)


def first_batch(adapter: Any) -> Any:
    """Returns the first batch of data that can be read once only, without taking it; else None.

    `GeneratorDataAdapter._first_batches` are the ones that Keras looked at itself. A PyDataset
    gives its batch by number: its threads, if any, feed one reader at a time.
    """
    if isinstance(adapter, GeneratorDataAdapter):
        return adapter._first_batches[0]
    if isinstance(adapter, PyDatasetAdapter):
        return adapter.py_dataset[0]
    return None


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
    """Returns the epoch to begin with, once callbacks have heard `on_train_begin`.

    `BackupAndRestore` says by `model._initial_epoch` with which a training goes on.
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
    """Says with which epoch a training goes on, as `BackupAndRestore` does; 0: with the given."""
    model._initial_epoch = epoch or None
