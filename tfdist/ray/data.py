"""Ray Data as the input of `fit`: each worker reads its part of a dataset.

The caller of `tfdist.ray.train` executes the dataset, whose blocks stay in Ray's object store. The
actor of each worker reads the blocks with the worker's rows, and sends these rows to its process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.errors import ConfigurationError, DataError
from tfdist.ray import reports

if TYPE_CHECKING:
    import tensorflow as tf

#: A column, or columns by name.
Columns = str | Sequence[str]


def dataset(
    name: str,
    batch_size: int,
    feature_columns: Columns,
    label_columns: Columns | None = None,
    *,
    shuffle_buffer: int = 0,
    seed: int = 0,
) -> Callable[[tf.distribute.InputContext], tf.data.Dataset]:
    """Returns input for `fit` from a dataset that was passed to `tfdist.ray.train`.

    Each worker reads consecutive rows, and all workers together read each row exactly once per
    epoch. A worker that receives fewer or more rows than expected raises an error.

    Example:
        >>> def fn():
        ...     import tfdist
        ...     from my_package import build_model
        ...
        ...     trainer = tfdist.Trainer(build_model, strategy="multi_worker")
        ...     rows = tfdist.ray.dataset("train", 64, "features", "label")
        ...     trainer.fit(rows, epochs=2, verbose=0)
        >>> train_rows = ray.data.read_parquet("data/train")  # doctest: +SKIP
        >>> tfdist.ray.train(fn, 2, datasets={"train": train_rows})  # doctest: +SKIP

    Args:
        name: A key of the argument `datasets` of `tfdist.ray.train`.
        batch_size: Number of rows of a global batch.
        feature_columns: The column with the model's input, or several, which become a dictionary.
        label_columns: The column or columns with the labels; None if there are no labels.
        shuffle_buffer: Size of each worker's shuffle buffer, in rows; 0: no shuffling.
        seed: Seed of the shuffling. The order differs from epoch to epoch.

    Returns:
        A function of a `tf.distribute.InputContext`, which `fit`, `evaluate` and `predict` accept.
    """

    def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
        import tensorflow as tf

        total, *sample = _read(name, 0, 1, 1)
        if not sample:
            raise DataError(f"The Ray dataset {name!r} has no rows.")
        worker, num_workers = context.input_pipeline_id, context.num_input_pipelines
        start, stop, worker_batch = share(total, batch_size, worker, num_workers)

        def batches() -> Iterator[Any]:
            count = 0
            for rows in itertools.islice(_read(name, start, stop, worker_batch), 1, None):
                count += len(next(iter(rows.values())))
                yield select(rows)
            if count != stop - start:
                raise DataError(
                    f"Ray dataset {name!r}: received {count} rows, expected {stop - start}."
                )

        def select(rows: Mapping[str, Any]) -> Any:
            x = _columns(rows, feature_columns)
            return x if label_columns is None else (x, _columns(rows, label_columns))

        spec = tf.nest.map_structure(
            lambda rows: tf.TensorSpec((None, *rows.shape[1:]), rows.dtype), select(sample[0])
        )
        batched = tf.data.Dataset.from_generator(batches, output_signature=spec)
        if shuffle_buffer:
            batched = batched.unbatch().shuffle(shuffle_buffer, seed).batch(worker_batch)
        else:
            batched = batched.rebatch(worker_batch)
        num_batches = -(-(stop - start) // worker_batch)
        return batched.apply(tf.data.experimental.assert_cardinality(num_batches))

    return make


def share(num_rows: int, batch_size: int, worker: int, num_workers: int) -> tuple[int, int, int]:
    """Returns a worker's first row, the row after its last, and its rows per global batch.

    Raises:
        ConfigurationError: The batch size is smaller than the number of workers.
    """
    if batch_size < num_workers:
        raise ConfigurationError(
            f"batch_size={batch_size} is smaller than the number of workers ({num_workers}). Use a "
            f"batch size of at least {num_workers}."
        )
    before = [batch_size * number // num_workers for number in (worker, worker + 1)]
    start, stop = (num_rows * rows // batch_size for rows in before)
    return start, stop, before[1] - before[0]


def _read(name: str, start: int, stop: int, num_rows: int) -> Iterator[Any]:
    """Yields the dataset's number of rows, and then rows from `start` to `stop`, by column."""
    with reports.connect_for_data() as connection:
        connection.send((name, start, stop, num_rows))
        for message in iter(connection.recv, {}):
            if isinstance(message, str):
                raise DataError(message)
            yield message


def _columns(rows: Mapping[str, Any], names: Columns) -> Any:
    wanted = [names] if isinstance(names, str) else list(names)
    if missing := [name for name in wanted if name not in rows]:
        raise DataError(
            f"The Ray dataset has no column {missing[0]!r}. Its columns: {', '.join(rows)}."
        )
    return rows[names] if isinstance(names, str) else {name: rows[name] for name in wanted}
