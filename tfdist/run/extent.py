"""Limits the batches of a run: the first N, or the same N in every epoch."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import tensorflow as tf

from tfdist.config import TrainConfig
from tfdist.errors import DataError

_NUM_REPEATED = 4  # batches, of `repeated`


def limited(config: TrainConfig, data: tf.data.Dataset, validation: Any) -> tuple[Any, Any]:
    """Returns the data of training and validation, limited as the configuration says.

    Args:
        config: `limit_steps` takes the first batches of each epoch, which shuffling changes;
            `overfit_batches` takes the same batches in every epoch and for validation.
        data: The training data.
        validation: The validation data, or None.

    Raises:
        DataError: The data have fewer batches than `overfit_batches`.
    """
    if config.overfit_batches:
        same = _kept(data, config.overfit_batches)
        return same, same
    if config.limit_steps:
        data = data.take(config.limit_steps)
        validation = None if validation is None else validation.take(config.limit_steps)
    return data, validation


def repeated(data: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the first batches of a data set again and again, from memory, for as many steps."""
    steps = int(data.cardinality())
    first = _kept(data, min(steps, _NUM_REPEATED) if steps > 0 else _NUM_REPEATED)
    return first.repeat().take(steps) if steps > 0 else first


def description(config: TrainConfig) -> dict[str, str]:
    """Returns the row of the start-up table on the limit; empty if there is none."""
    if config.overfit_batches:
        return {"data": f"the same {config.overfit_batches} batches for training and validation"}
    if config.limit_steps:
        return {"data": f"at most {config.limit_steps} batches of an epoch or a validation"}
    return {}


def _kept(data: tf.data.Dataset, number: int) -> tf.data.Dataset:
    """Returns the first batches from memory; `cache` would change them until its first end."""
    batches = list(itertools.islice(data, number))
    if len(batches) < number:
        raise DataError(
            f"overfit_batches={number}: expected as many in train_data, got {len(batches)}: ask "
            "for fewer."
        )
    one_each = map(tf.data.Dataset.from_tensors, batches)
    return functools.reduce(tf.data.Dataset.concatenate, one_each)
