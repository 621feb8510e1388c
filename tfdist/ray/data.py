"""Ray Data as the input of `fit`: each worker reads its share of the rows of a dataset.

The caller of `tfdist.ray.train` executes the dataset, whose blocks stay in Ray's object store. The
actor of each worker reads the blocks that contain its worker's rows, and sends them to its process.
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
    """Returns input for `fit` from a dataset of Ray Data that `tfdist.ray.train` got.

    Each worker reads consecutive rows, and all workers together read each row exactly once per
    epoch. A worker that gets fewer or more rows than its share raises an error.

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
        label_columns: The same for the labels; None: none.
        shuffle_buffer: Number of rows among which each worker draws the next one; 0: the order of
            the dataset.
        seed: Of the shuffling, which differs from epoch to epoch.

    Returns:
        A function of a `tf.distribute.InputContext`, which `fit`, `evaluate` and `predict` accept.
    """

    def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
        import tensorflow as tf

        total, *sample = _read(name, 0, 1, 1)
        if not sample:
            raise DataError(f"The Ray dataset {name!r} has no rows.")
        worker, num_workers = context.input_pipeline_id, context.num_input_pipelines
        start, stop, own_batch = share(total, batch_size, worker, num_workers)

        def batches() -> Iterator[Any]:
            count = 0
            for rows in itertools.islice(_read(name, start, stop, own_batch), 1, None):
                count += len(next(iter(rows.values())))
                yield selected(rows)
            if count != stop - start:
                raise DataError(f"Ray dataset {name!r}: got {count} of {stop - start} rows.")

        def selected(rows: Mapping[str, Any]) -> Any:
            x = _columns(rows, feature_columns)
            return x if label_columns is None else (x, _columns(rows, label_columns))

        spec = tf.nest.map_structure(
            lambda rows: tf.TensorSpec((None, *rows.shape[1:]), rows.dtype), selected(sample[0])
        )
        found = tf.data.Dataset.from_generator(batches, output_signature=spec)
        if shuffle_buffer:
            found = found.unbatch().shuffle(shuffle_buffer, seed).batch(own_batch)
        else:
            found = found.rebatch(own_batch)
        num_batches = -(-(stop - start) // own_batch)
        return found.apply(tf.data.experimental.assert_cardinality(num_batches))

    return make


def share(num_rows: int, batch_size: int, worker: int, num_workers: int) -> tuple[int, int, int]:
    """Returns a worker's first row, the row after its last one, and its rows of a global batch.

    Raises:
        ConfigurationError: A worker would get no row of a global batch.
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
    with reports.connected() as connection:
        connection.send((name, start, stop, num_rows))
        for message in iter(connection.recv, {}):
            if isinstance(message, str):
                raise DataError(message)
            yield message


def _columns(rows: Mapping[str, Any], names: Columns) -> Any:
    wanted = [names] if isinstance(names, str) else list(names)
    if missing := [name for name in wanted if name not in rows]:
        raise DataError(f"The Ray dataset has no column {missing[0]!r}, only {', '.join(rows)}.")
    return rows[names] if isinstance(names, str) else {name: rows[name] for name in wanted}
