"""Checks and limits the datasets of a recipe."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import tensorflow as tf

import pipelines
from tfdist.config import TrainConfig
from tfdist.errors import DataError
from tfdist.strategies import batches
from tfdist.upstream.input_data import is_reshuffled

if TYPE_CHECKING:
    from tfdist.strategies import Strategy

_NUM_REPEATED = 4  # batches of `repeated`

#: Stateful operations, whose results depend on earlier calls in any thread.
_STATEFUL = frozenset(
    {
        "Multinomial",
        "ParameterizedTruncatedNormal",
        "RandomGamma",
        "RandomPoissonV2",
        "RandomShuffle",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "SampleDistortedBoundingBoxV2",
        "TruncatedNormal",
    }
)


@contextmanager
def one_local_rank_at_a_time(strategy: Strategy) -> Iterator[None]:
    """Runs the block on one worker of a host at a time: the first one writes, the others read."""
    rank = strategy.group.local_rank
    num_turns = int(strategy.group.gather([rank]).max()) + 1
    for _ in range(rank):
        strategy.group.barrier()
    yield
    for _ in range(num_turns - rank):
        strategy.group.barrier()


def check_batches(data: Any, function: str, batch_size: int | None) -> None:
    """Checks that a function of a recipe returned batches of the configured size.

    Raises:
        DataError: The value is no `tf.data.Dataset`, is not batched, or has batches of other sizes.
    """
    if not isinstance(data, tf.data.Dataset):
        raise DataError(
            f"{function}: expected a tf.data.Dataset of batches, got {type(data).__name__}. Return "
            "a dataset such as tf.data.Dataset.from_tensor_slices((x, y)).batch(config.batch_size)."
        )
    shapes, rows = _shapes(data), _static_rows(data)
    if 0 in rows or len(rows) > 1 or (batch_size and rows - {batch_size}):
        raise DataError(
            f"{function}: expected batches of {batch_size or 'any number of'} rows, got elements "
            f"of the shapes {', '.join(map(str, shapes))}. Add .batch(config.batch_size)."
        )
    if batch_size and num_rows(data) not in (None, batch_size):
        raise DataError(
            f"{function}: expected batches of {batch_size} rows, got batches of {num_rows(data)}. "
            "Use .batch(config.batch_size)."
        )


def check_repeatable(data: tf.data.Dataset, function: str) -> None:
    """Checks that a dataset does not use random operations with state that threads share.

    In a parallel `interleave`, the order in which threads draw differs between runs, even with
    deterministic operations.

    Raises:
        DataError: The data set uses a stateful random operation.
    """
    variant = tf.data.experimental.to_variant(data)
    graph = tf.compat.v1.GraphDef()
    graph.ParseFromString(
        tf.raw_ops.DatasetToGraphV2(
            input_dataset=variant, external_state_policy=1, strip_device_assignment=True
        ).numpy()
    )
    nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
    if stateful := sorted({node.op for node in nodes} & _STATEFUL):
        raise DataError(
            f"--deterministic: {function} uses {', '.join(stateful)}, whose results depend on the "
            "order of threads. Use tf.random.stateless_* with a seed per record, such as the one "
            "that pipelines.read passes to augment_fn."
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
        with pipelines.peek():
            for batch in data.take(1):
                if any(map(batches.has_rows, tf.nest.flatten(batch))):
                    return int(batches.num_rows(batch))
    except tf.errors.OpError:
        pass  # training raises an error with a better message
    return None


def limited(config: TrainConfig, data: tf.data.Dataset, validation: Any) -> tuple[Any, Any]:
    """Returns the data of training and validation, limited as configured.

    Args:
        config: `limit_steps` takes the first batches of each epoch, which shuffling changes;
            `overfit_batches` takes the same batches in every epoch and for validation.
        data: The training data.
        validation: The validation data, or None.

    Raises:
        DataError: The data have fewer batches than `overfit_batches`.
    """
    if config.overfit_batches:
        same = _first_batches(data, config.overfit_batches)
        return same, same
    if config.limit_steps:
        data = data.take(config.limit_steps)
        validation = None if validation is None else validation.take(config.limit_steps)
    return data, validation


def repeated(data: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset of equal length that repeats the first batches from memory."""
    steps = int(data.cardinality())
    first = _first_batches(data, min(steps, _NUM_REPEATED) if steps > 0 else _NUM_REPEATED)
    return first.repeat().take(steps) if steps > 0 else first


def describe_limit(config: TrainConfig) -> dict[str, str]:
    """Returns the row of the start-up table on the limit; empty if there is none."""
    if config.overfit_batches:
        return {"data": f"the same {config.overfit_batches} batches for training and validation"}
    if config.limit_steps:
        return {"data": f"at most {config.limit_steps} batches of an epoch or a validation"}
    return {}


def _first_batches(data: tf.data.Dataset, number: int) -> tf.data.Dataset:
    """Returns the first batches from memory. `cache` would reread them until its first end."""
    first = list(itertools.islice(data, number))
    if len(first) < number:
        raise DataError(
            f"overfit_batches={number}: expected as many in train_data, got {len(first)}: choose "
            "a smaller number."
        )
    one_each = map(tf.data.Dataset.from_tensors, first)
    return functools.reduce(tf.data.Dataset.concatenate, one_each)


def _shapes(data: tf.data.Dataset) -> list[tf.TensorShape]:
    return [spec.shape for spec in tf.nest.flatten(data.element_spec) if hasattr(spec, "shape")]


def _static_rows(data: tf.data.Dataset) -> set[int]:
    """Returns the known sizes of the first dimension, with 0 for a scalar."""
    shapes = (shape for shape in _shapes(data) if shape.rank is not None)
    return {shape[0] if shape.rank else 0 for shape in shapes} - {None}
