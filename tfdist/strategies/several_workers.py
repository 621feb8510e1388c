"""What several workers add to one: they begin equal, exchange numbers, and read the same batches.

A worker is a process that runs the whole script. How sums cross the workers is each strategy's own
`all_reduce`; everything here is such a sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import cluster
from tfdist.errors import ConfigurationError, UnsupportedModelError
from tfdist.strategies import batches, inner_loop
from tfdist.strategies.base import Strategy
from tfdist.strategies.batches import checksum, drop_padding, num_rows, pad_to_one_row
from tfdist.strategies.collectives import host_values, same_variables
from tfdist.watchdog import start_up

_WIRE_DTYPES = {"fp16": tf.float16, "bf16": tf.bfloat16}


class SeveralWorkers(Strategy):
    """A strategy of workers that all run the script; stands before the one of a single process.

    A subclass sets `num_workers` and `rank`, has an `all_reduce` over all replicas and a
    `gather_words`, and calls `start` at the end of its `__init__`. One worker is as if there were
    no others.
    """

    def cross_as(self, compression: str, bucket_mb: float | str) -> None:
        """Says how gradients cross the workers.

        Args:
            compression: `"fp16"` or `"bf16"` halves what crosses, and rounds it; `"none"` keeps
                the numbers of one device.
            bucket_mb: Megabytes of gradients that cross together, while the backward pass makes
                the next; `"auto"`: by how many there are; `"all"`: they cross at once.

        Raises:
            ConfigurationError: That is no such size.
        """
        if bucket_mb in ("all", "auto"):
            self.bucket_bytes = None if bucket_mb == "all" else "auto"
        elif isinstance(bucket_mb, (int, float)) and bucket_mb > 0:
            self.bucket_bytes = int(bucket_mb * (1 << 20))
        else:
            raise ConfigurationError(
                f"bucket_mb={bucket_mb!r}: expected megabytes above 0, 'auto' or 'all'."
            )
        if compression != "none":
            self.wire_dtype = _WIRE_DTYPES[compression]
            format_name = self.wire_dtype.name
            self.inexact = {"compression": f"gradients cross the workers as {format_name}"}

    def silent(self) -> list[int]:
        """Returns the ranks that give no sign of life, as far as that can be known."""
        return []

    def start(self) -> None:
        """Checks that the workers fit together and gives them one seed; all of them call it.

        Raises:
            ConfigurationError: They have different numbers of devices.
        """
        if self.num_workers > 1:
            with start_up.waiting(self.rank, self.num_workers, self.silent):
                host_values.check_as_many(self, len(self.devices), "devices", "devices")
                host_values.synchronize_seed(self)
        cluster.on_barrier(self.barrier)

    @property
    def stops_together(self) -> bool:
        return self.num_workers > 1

    @property
    def local_rank(self) -> int:
        return cluster.current().local_rank

    @property
    def num_replicas(self) -> int:
        return super().num_replicas * self.num_workers

    @property
    def first_replica(self) -> int:
        return super().num_replicas * self.rank

    def describe(self) -> dict[str, str]:
        return super().describe() | cluster.current().describe()

    def distribute(
        self, dataset: tf.data.Dataset, own_rows: bool = False, whole: bool = False
    ) -> Any:
        if own_rows and self.num_workers > 1:
            if whole:
                raise UnsupportedModelError(
                    "This model needs whole batches, but every worker reads rows of its own: pass "
                    "the data set of the global batches, the same on every worker, not a function."
                )
            dataset = dataset.concatenate(batches.without_rows(dataset.element_spec).repeat())
        return super().distribute(dataset, own_rows, whole)

    def split(self, batch: batches.Batch, own_rows: bool, whole: bool = False) -> batches.Element:
        if self.num_workers == 1:
            return super().split(batch, own_rows, whole)
        if whole:
            return super().split(batch, own_rows, whole)._replace(checksum=checksum(batch))
        if own_rows:
            rows, num_shares = num_rows(batch), self.num_local_replicas
            own = batches.split(pad_to_one_row(batch), num_shares, range(num_shares), rows)
            far = tf.constant(self.rank * batches.OWN_ROWS_APART, tf.int64)
            own = tuple(one._replace(first_row=far + one.first_row) for one in own)
            return batches.Element(rows, tf.constant(0, tf.int64), own)
        numbers = range(self.first_replica, self.first_replica + self.num_local_replicas)
        own = batches.split(batch, self.num_replicas, numbers)
        return batches.Element(num_rows(batch), checksum(batch), own)

    def prepare(self, model: Any, optimizers: Sequence[Any]) -> None:
        super().prepare(model, optimizers)
        if self.num_workers > 1:
            states = [v for optimizer in optimizers for v in optimizer.variables]
            self.make_same(model.variables + states)

    def make_same(self, variables: Sequence[keras.Variable]) -> None:
        """Gives variables the values that they have on rank 0.

        Raises:
            ClusterError: The workers built different models.
        """
        same_variables.broadcast_and_check(self, variables)

    def compile(
        self,
        step: inner_loop.Step,
        eager: bool = False,
        may_end: bool = True,
        own_rows: bool = False,
    ) -> inner_loop.LoopFn:
        if not own_rows or self.num_workers == 1:
            return super().compile(step, eager, may_end, own_rows)

        loop = inner_loop.eager if eager else inner_loop.in_graph
        receive = functools.partial(self.received, own_rows=True)
        return loop(receive, step, inner_loop.End.WITHOUT_ROWS)

    def received(self, taken: Any, own_rows: bool) -> batches.Element:
        element = super().received(taken, own_rows)
        if not own_rows or self.num_workers == 1:
            return element
        return element._replace(num_rows=host_values.total(self, element.num_rows))

    def outputs(
        self, fn: Callable[[batches.Batch], Any], element: batches.Element, whole: bool = False
    ) -> list[Any]:
        if self.num_workers == 1 or whole:
            return super().outputs(fn, element, whole)

        def on_replica(i: int) -> Any:
            return drop_padding(fn(element.shares[i].rows), element.shares[i].num_rows)

        return self.local_results(self.run(on_replica))

    def gather(self, numbers: Sequence[float]) -> np.ndarray:
        own = super().gather(numbers)
        return own if self.num_workers == 1 else host_values.gather(self, own)

    def gather_bytes(self, own: np.ndarray) -> list[np.ndarray]:
        if self.num_workers == 1:
            return super().gather_bytes(own)
        return host_values.gather_bytes(self, self.gather_words, own)

    def gather_words(self, words: np.ndarray) -> np.ndarray:
        """Returns numbers of all workers, in each of them; called outside of any graph.

        Args:
            words: int64, shape `(n,)`, as many on every worker.

        Returns:
            Shape `(num_workers, n)`, int64.
        """
        raise NotImplementedError

    def broadcast_text(self, text: str) -> str:
        return text if self.num_workers == 1 else host_values.broadcast_text(self, text)

    def add_up(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        return list(arrays) if self.num_workers == 1 else host_values.add_up(self, arrays)

    def broadcast(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        own = super().broadcast(arrays)
        return own if self.num_workers == 1 else host_values.broadcast_arrays(self, own)

    def barrier(self) -> None:
        self.gather([0.0])
