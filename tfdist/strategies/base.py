"""The interface of a strategy; the base class is one device.

A step has two halves. On each *replica* a function computes sums over the rows of its share and
exchanges them (`run`, `all_reduce`). Then, for each *copy* of the variables, another applies them
(`update`): there the Keras optimizer runs as it does on one device. The loop over the steps lies
inside one `tf.function` (`compile`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.devices import resolve
from tfdist.errors import ConfigurationError
from tfdist.strategies import inner_loop, shares
from tfdist.strategies.collectives import host_values
from tfdist.strategies.collectives import same_variables as alike

#: Takes a replica's index, a Python int, and returns a structure of tensors.
ReplicaFn = Callable[[int], Any]


class Strategy:
    """Computes on one device.

    Attributes:
        name: What the command line calls it.
        devices: Names of the devices of this process, one a replica.
        num_workers: Processes that train together.
        rank: This process among them.
        num_replicas: Replicas over all workers.
        is_chief: Whether this process writes and talks.

    Args:
        devices: One, as `tfdist.devices.resolve` takes it; None: the first GPU, or the CPU.

    Raises:
        ConfigurationError: More than one device.
        DeviceError: A device that does not exist.
    """

    name = "one_device"
    default_cpus = 1
    num_workers = 1
    rank = 0
    #: Whether a replica finds its variables on its own device, as XLA needs them.
    has_local_variables = True
    #: Whether nobody else changes the variables between a step's reading and its writing.
    writes_alone = True
    #: In what format gradients cross the replicas; None: in their own.
    wire_dtype: tf.DType | None = None
    #: What this strategy cannot compute to the numbers of one device, and why.
    inexact: Mapping[str, str] = MappingProxyType({})

    def __init__(self, devices: int | str | Sequence[str] | None = None) -> None:
        self.devices = resolve(1 if devices is None else devices, self.default_cpus)
        if len(self.devices) > 1:
            raise ConfigurationError(
                f"strategy 'one_device' computes on one, but got {', '.join(self.devices)}: "
                "name one, or choose 'mirrored'."
            )

    @property
    def num_replicas(self) -> int:
        """Number of replicas over all workers."""
        return len(self.devices) * self.num_workers

    @property
    def first_replica(self) -> int:
        """The number, among all replicas, of this process's first."""
        return len(self.devices) * self.rank

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one that writes and talks."""
        return self.rank == 0

    def describe(self) -> dict[str, str]:
        """Returns what the start-up table says of this strategy."""
        on_cpu = all(device.startswith("CPU") for device in self.devices)
        stand_in = " (logical CPU devices, for want of GPUs)" if on_cpu else ""
        return {
            "strategy": self.name,
            "devices": ", ".join(self.devices) + stand_in,
            "replicas": str(self.num_replicas),
            "shard policy": "each global batch is split over the replicas",
        }

    def summary(self) -> dict[str, str]:
        """Returns what the table at the end of a training says of this strategy."""
        return {}

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Model and optimizer are created inside: it places their variables."""
        with tf.device(self.devices[0]):
            yield

    def owns(self, variable: tf.Variable) -> bool:
        """Tells whether a variable was created in a scope of this strategy, or could have been."""
        return not isinstance(variable, tf.distribute.DistributedValues)

    def distribute(self, dataset: tf.data.Dataset, own_rows: bool = False) -> Any:
        """Turns a data set of batches into one of elements that `unpack` takes.

        Args:
            dataset: Of global batches, the same on every worker.
            own_rows: Whether the batches are this worker's part of the global ones instead. Then
                the data never end; where one worker's do, batches without rows follow.
        """
        if own_rows and self.num_workers > 1:
            dataset = dataset.concatenate(shares.without_rows(dataset.element_spec).repeat())
        # Nothing in it is for AutoGraph, whose conversion takes about as long as the tracing.
        convert = tf.autograph.experimental.do_not_convert
        split = convert(functools.partial(self._shares_of, own_rows))
        dataset = dataset.map(split, tf.data.AUTOTUNE, deterministic=True)
        if len(self.devices) == 1 and self.devices[0].startswith("GPU"):
            return dataset.apply(tf.data.experimental.prefetch_to_device(self.devices[0]))
        return dataset.prefetch(tf.data.AUTOTUNE)

    def _shares_of(self, own_rows: bool, *batch: shares.Batch) -> shares.Element:
        """One element of the distributed data set."""
        whole = shares.without_optionals(batch[0] if len(batch) == 1 else batch)
        num_shares = len(self.devices) if own_rows else self.num_replicas
        first = 0 if own_rows else self.first_replica
        parts = shares.split(whole, num_shares, range(first, first + len(self.devices)))
        alike = self.num_workers > 1 and not own_rows
        checksum = host_values.checksum(whole) if alike else tf.constant(0, tf.int64)
        return shares.Element(shares.num_rows(whole), checksum, parts)

    def unpack(self, element: Any) -> shares.Element:
        """Returns an element of a distributed data set with its shares by replica."""
        return shares.Element(*element)

    def prepare(self, model: Any, optimizer: Any) -> None:
        """Makes the state of all workers that of rank 0, before the first step.

        Raises:
            ClusterError: The workers built different models.
        """
        if self.num_workers > 1:
            alike.start_alike(self, model.variables + optimizer.variables)

    def run(self, fn: ReplicaFn) -> Any:
        """Calls `fn(index)` on every replica of this process; the index counts from 0 in each.

        Returns:
            The results, to be handed to `update` or to `local_results`.
        """
        with tf.device(self.devices[0]):
            return fn(0)

    def local_results(self, results: Any) -> list[Any]:
        """Returns what `run` returned as a list, one result a replica of this process."""
        return [results]

    def update(self, fn: Callable[[Any], Any], results: Any) -> list[Any]:
        """Calls `fn(result)` once for each copy of the variables, with its own replica's result.

        Inside, assigning to a variable changes that copy alone, without any exchange.

        Returns:
            The tensor, or None, that `fn` returned for each copy.
        """
        with tf.device(self.devices[0]):
            return [fn(results)]

    def all_reduce(self, tensors: list, op: str = "SUM") -> list:
        """Returns tensors reduced over all replicas; called on a replica.

        Args:
            tensors: Dense tensors or `tf.IndexedSlices`; the same shapes on every replica.
            op: `"SUM"` or `"MEAN"`.
        """
        del op
        return tensors

    def compile(
        self,
        step: inner_loop.Step,
        eager: bool = False,
        may_end: bool = True,
        own_rows: bool = False,
    ) -> inner_loop.Run:
        """Returns a function that makes many steps in one call.

        Args:
            step: Called outside of the replicas, on each global batch.
            eager: Whether the loop runs in Python.
            may_end: Whether the data may end before the steps asked for.
            own_rows: As in `distribute`.
        """
        several = own_rows and self.num_workers > 1

        def receive(taken: Any) -> shares.Element:
            element = self.unpack(taken)
            if several:
                element = element._replace(num_rows=host_values.total(self, element.num_rows))
            return element

        end = (
            inner_loop.End.WITHOUT_ROWS
            if several
            else inner_loop.End.OF_ITERATOR
            if may_end
            else None
        )
        return (inner_loop.eager if eager else inner_loop.in_graph)(receive, step, end)

    def gather(self, numbers: Sequence[float]) -> np.ndarray:
        """Returns numbers of all workers, in each of them; called outside of any graph.

        Args:
            numbers: As many on every worker.

        Returns:
            Shape `(num_workers, len(numbers))`, float64.
        """
        mine = np.asarray([numbers], np.float64)
        return host_values.gather(self, mine) if self.num_workers > 1 else mine

    def barrier(self) -> None:
        """Waits until every worker has come here."""
        self.gather([0.0])

    def join(self) -> None:
        """Waits for what is asynchronous; nothing here."""

    def explaining(self) -> AbstractContextManager[None]:
        """Within it, an error that a lost process causes is raised as one that says so."""
        return nullcontext()
