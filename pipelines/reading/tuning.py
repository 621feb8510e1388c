"""What of reading can be tuned. None of it changes which records come, or their order."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf


class Tuning(NamedTuple):
    """How much reading does at once; the defaults leave it to `tf.data`, which measures.

    Attributes:
        num_reads: blocks of records read at once: more where the disk is far away.
        num_maps: calls of each map at once.
        num_prefetched: batches made ahead of the step.
        num_threads: threads that this dataset has for itself, where others should keep theirs;
            None shares TensorFlow's.
        ram_bytes: what `tf.data` may use for buffers whose size it chooses; None: half of what
            the machine has free.
    """

    num_reads: int = tf.data.AUTOTUNE
    num_maps: int = tf.data.AUTOTUNE
    num_prefetched: int = tf.data.AUTOTUNE
    num_threads: int | None = None
    ram_bytes: int | None = None

    def options(self, *, deterministic: bool) -> tf.data.Options:
        """The dataset's options; a deterministic order is that of one thread."""
        options = tf.data.Options()
        options.deterministic = deterministic
        # Sharding is handed in; a second one by tf.distribute would lose records without a word.
        off = tf.data.experimental.AutoShardPolicy.OFF
        options.experimental_distribute.auto_shard_policy = off
        if self.num_threads is not None:
            options.threading.private_threadpool_size = self.num_threads
        if self.ram_bytes is not None:
            options.autotune.ram_budget = self.ram_bytes
        return options


DEFAULT = Tuning()
