"""Checks that a recipe's data are batches of the configured size."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import pipelines
from tfdist.errors import DataError
from tfdist.strategies import batches
from tfdist.upstream.tensorflow_data import is_reshuffled


def check(data: Any, function: str, batch_size: int | None) -> None:
    """Checks the data that a function of a recipe returned.

    Args:
        data: The returned value.
        function: Name of the function.
        batch_size: Expected rows per batch; None: any number.

    Raises:
        DataError: The value is no `tf.data.Dataset`, is not batched, or has other batches.
    """
    if not isinstance(data, tf.data.Dataset):
        raise DataError(
            f"{function}: expected a tf.data.Dataset of batches, got {type(data).__name__}: return "
            "one, say tf.data.Dataset.from_tensor_slices((x, y)).batch(config.batch_size)."
        )
    shapes, rows = _shapes(data), _static_rows(data)
    if 0 in rows or len(rows) > 1 or (batch_size and rows - {batch_size}):
        raise DataError(
            f"{function}: expected batches of {batch_size or 'any number of'} rows, got elements "
            f"of the shapes {', '.join(map(str, shapes))}: end it with .batch(config.batch_size)."
        )
    if batch_size and num_rows(data) not in (None, batch_size):
        raise DataError(
            f"{function}: expected batches of {batch_size} rows, got batches of {num_rows(data)}: "
            "end it with .batch(config.batch_size)."
        )


def num_rows(data: tf.data.Dataset) -> int | None:
    """Returns the rows of a full batch, or None if unknown, as after a `map` behind `batch`."""
    if len(rows := _static_rows(data)) == 1:
        return next(iter(rows))
    variant = tf.data.experimental.to_variant(data)
    computed = int(tf.raw_ops.ComputeBatchSize(input_dataset=variant))
    return computed if computed > 0 else None


def num_rows_of_first(data: tf.data.Dataset) -> int | None:
    """Reads the first batch and returns its number of rows.

    Returns:
        None if there is no batch, or if reading it would change the order of the training.
    """
    if is_reshuffled(data):
        return None
    try:
        with pipelines.looking():
            for batch in data.take(1):
                if any(map(batches.has_rows, tf.nest.flatten(batch))):
                    return int(batches.num_rows(batch))
    except tf.errors.OpError:
        pass  # the training says what is wrong with the data
    return None


def _shapes(data: tf.data.Dataset) -> list[tf.TensorShape]:
    return [spec.shape for spec in tf.nest.flatten(data.element_spec) if hasattr(spec, "shape")]


def _static_rows(data: tf.data.Dataset) -> set[int]:
    """Returns the known sizes of the first dimension, with 0 for a scalar."""
    known = (shape for shape in _shapes(data) if shape.rank is not None)
    return {shape[0] if shape.rank else 0 for shape in known} - {None}
