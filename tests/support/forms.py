"""The same rows in every form that `fit` accepts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import pytest
import tensorflow as tf


class Batches(keras.utils.PyDataset):
    """The rows in batches. Counts the completed epochs in `ended`."""

    def __init__(self, *arrays: Any, size: int = 4, **options: Any) -> None:
        super().__init__(**options)
        self.arrays, self.size, self.ended = arrays, size, 0

    def __len__(self) -> int:
        return -(-len(keras.tree.flatten(self.arrays)[0]) // self.size)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        rows = slice(index * self.size, (index + 1) * self.size)
        return tuple(keras.tree.map_structure(lambda a: a[rows], a) for a in self.arrays)

    def on_epoch_end(self) -> None:
        self.ended += 1


def generated(*arrays: Any, size: int = 4) -> Iterator[tuple[Any, ...]]:
    batches = Batches(*arrays, size=size)
    return (batches[i] for i in range(len(batches)))


def sliced(*arrays: Any, size: int = 4) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays).batch(size)


def from_context(*arrays: Any, size: int = 4) -> Callable[[Any], tf.data.Dataset]:
    def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
        assert isinstance(context, tf.distribute.InputContext)
        assert context.num_input_pipelines == 1
        return sliced(*arrays, size=size)

    return dataset_fn


def hugging_face(x: Any, y: Any = None, size: int = 4) -> tf.data.Dataset:
    datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
    columns = x if isinstance(x, dict) else {"x": x}
    table = columns if y is None else columns | {"y": y}
    table = datasets.Dataset.from_dict({name: list(rows) for name, rows in table.items()})
    names = [*columns] if isinstance(x, dict) else "x"
    return table.to_tf_dataset(size, names, label_cols=None if y is None else "y")


FORMS: dict[str, Callable[..., Any]] = {
    "dataset": sliced,
    "unknown length": lambda *arrays: sliced(*arrays).filter(lambda *_: True),
    "generator": generated,
    "PyDataset": Batches,
    "PyDataset with workers": functools.partial(Batches, workers=2),
    "dataset_fn": from_context,
    "to_tf_dataset": hugging_face,
}
