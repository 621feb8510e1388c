"""Performance settings of reading, and reading by a `tf.data` service.

The settings of `Tuning` change neither the records nor their order. A `tf.data` service reads and
maps on other machines. Its workers receive the graph of the dataset, which must not contain Python
functions, and must find the shards under the same path. A dispatcher hands out blocks of records to
idle workers: each record is read once per epoch while no worker fails, in an order that depends on
timing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf
from pydantic import ByteSize, TypeAdapter, ValidationError

from pipelines.cores import num_cores
from pipelines.errors import DataError

_READ_AHEAD, _CACHE_DIR = "PIPELINES_READ_AHEAD", "PIPELINES_CACHE_DIR"


class Tuning(NamedTuple):
    """Parallelism, prefetching and memory of reading.

    `tf.data.AUTOTUNE`, the default of the numbers, is one parallel call per core: see
    `without_autotuning`.

    Example:
        >>> tuning = pipelines.Tuning(num_maps=2, ram_bytes=2**30)
        >>> dataset = pipelines.read("data/digits", 64, tuning=tuning)

    Attributes:
        num_reads: Blocks of local files read in parallel, by default 16; more for slow disks.
        num_maps: Parallel calls of each map function.
        num_prefetched: Batches prepared ahead of the training step.
        num_threads: Size of a private thread pool of this dataset; None: TensorFlow's shared pool.
        read_ahead_bytes: Memory for data that are read ahead from a URL; None: the value of the
            environment variable `PIPELINES_READ_AHEAD`, or 512 MB.
        cache_dir: Local folder that caches data read from URLs. Several processes can share it.
            None: the value of the environment variable `PIPELINES_CACHE_DIR`, or no cache.
        cache_bytes: Size limit of that folder. The least recently used data are removed.
        ram_bytes: Turns the autotuning of `tf.data` on, with a bound of this size on the memory of
            its buffers.
    """

    num_reads: int = tf.data.AUTOTUNE
    num_maps: int = tf.data.AUTOTUNE
    num_prefetched: int = tf.data.AUTOTUNE
    num_threads: int | None = None
    ram_bytes: int | None = None
    read_ahead_bytes: int | None = None
    cache_dir: str | Path | None = None
    cache_bytes: int = 100 << 30

    @property
    def read_ahead(self) -> int:
        """Largest number of bytes that are read ahead from a URL."""
        if self.read_ahead_bytes is not None:
            return self.read_ahead_bytes
        size = os.environ.get(_READ_AHEAD, "512MB")
        try:
            return TypeAdapter(ByteSize).validate_python(size)
        except ValidationError:
            raise DataError(f"{_READ_AHEAD}: expected a size such as 512MB, got {size!r}") from None

    @property
    def cache(self) -> str | Path | None:
        """Local folder that caches what is read from URLs, or None."""
        return self.cache_dir or os.environ.get(_CACHE_DIR) or None

    def options(self, *, deterministic: bool) -> tf.data.Options:
        """Returns the options of a dataset. A deterministic order is that of a single thread."""
        options = tf.data.Options() if self.ram_bytes is not None else _no_autotuning()
        options.deterministic = deterministic
        # The data are divided already; tf.distribute would silently drop records by dividing again.
        off = tf.data.experimental.AutoShardPolicy.OFF
        options.experimental_distribute.auto_shard_policy = off
        if self.num_threads is not None:
            options.threading.private_threadpool_size = self.num_threads
        if self.ram_bytes is not None:
            options.autotune.ram_budget = self.ram_bytes
        return options


DEFAULT = Tuning()


def without_autotuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a data set in which `tf.data.AUTOTUNE` is one parallel call per core.

    Autotuning costs time at the end: a thread of the iterator sleeps for up to a minute between two
    rounds, and in up to a third of the iterators that are discarded it does not see that it should
    stop. Whoever discards the iterator, such as the end of an epoch, then waits for that minute
    (`Model::OptimizeLoop` in TensorFlow 2.21 asks `CancellationManager::IsCancelled`, which is
    false until all callbacks have returned). `read` and `mix` return data sets without autotuning
    themselves.

    Example:
        >>> dataset = tf.data.Dataset.range(3).map(lambda x: 2 * x, tf.data.AUTOTUNE)
        >>> [int(x) for x in pipelines.without_autotuning(dataset)]
        [0, 2, 4]
    """
    return dataset.with_options(_no_autotuning())


def _no_autotuning() -> tf.data.Options:
    options = tf.data.Options()
    options.autotune.enabled = False
    # The default is at most 16; autotuning would raise it to the number of cores.
    options.autotune.initial_parallelism = num_cores()
    return options


def through_data_service(
    dataset: tf.data.Dataset, address: str, batch_size: int, *, drop_remainder: bool
) -> tf.data.Dataset:
    """Runs a dataset on a `tf.data` service, and forms full batches here."""
    options = tf.data.Options()
    # Random operations have a state, which a restarted worker does not restore.
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    dataset = dataset.with_options(options)
    service = tf.data.experimental.service
    dataset = dataset.apply(service.distribute(service.ShardingPolicy.DYNAMIC, address))
    return dataset.rebatch(batch_size, drop_remainder)
