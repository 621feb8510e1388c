"""The interface of a strategy.

A strategy is a layout of the replicas of one process (where a model's variables are and what each
device computes) on a process group (what processes exchange). A step has two halves. On each
replica a function computes sums over the rows of its per-replica batch and all-reduces them (`run`,
`all_reduce`). Then another function applies them, once for each set of the variables (`update`):
there the Keras optimizer runs as it does on one device. The loop over the steps is inside one
`tf.function` (`Feed.compile`).

`one_device` is the simplest strategy, and `towers` a complete one for several devices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import tensorflow as tf

from tfdist import cluster
from tfdist.cluster import deadline
from tfdist.cluster.remote import connection
from tfdist.devices import resolve
from tfdist.groups import agreement
from tfdist.groups.base import LocalGroup, ProcessGroup
from tfdist.groups.buckets import GradientExchange
from tfdist.groups.collective import CollectiveGroup
from tfdist.groups.horovod import HorovodGroup, limit_visible_gpus
from tfdist.strategies import batches
from tfdist.strategies.feed import Feed
from tfdist.strategies.variables import VariableLayout

#: Takes a replica's index, a Python int, and returns a structure of tensors.
ReplicaFn = Callable[[int], Any]


class Strategy(ABC):
    """Where the replicas of a process compute, and how they exchange sums.

    A subclass implements the four abstract methods and overrides what differs of the others. It
    passes a `VariableLayout` and a `Feed` unless those of one device fit.

    Attributes:
        name: The name on the command line.
        devices: Names of the devices of this process, one for each replica.
        group: The processes that train together.
        variables: Where the variables of models are, and how they stay equal.
        exchange: How gradients are sent between processes.
        inexact: What does not match one device under this strategy, and why.
        feed: The data of this process, and the loop that takes steps on it.

    Args:
        devices: Names of devices.
        group: The processes that train together; None: this process alone.
        variables: Where variables are; None: one set in each process.
        feed: How global batches get to the replicas; None: split over the devices.
        exchange: How gradients are sent between processes; None: all at once.

    Raises:
        ConfigurationError: The processes have different numbers of devices.
    """

    name: str
    #: Logical CPU devices to create if there is no GPU and nobody asks for a number.
    default_cpus = 1
    #: Number of weights from which on the replicas call one shared traced function; None: each
    #: replica is traced separately.
    one_trace_from: int | None = None

    def __init__(
        self,
        devices: Sequence[str],
        group: ProcessGroup | None = None,
        variables: VariableLayout | None = None,
        feed: Feed | None = None,
        exchange: GradientExchange | None = None,
    ) -> None:
        self.devices = list(devices)
        self.group = LocalGroup() if group is None else group
        self.variables = variables or VariableLayout(self.devices, self.group)
        self.exchange = exchange or GradientExchange()
        self.inexact: Mapping[str, str] = self.exchange.inexact()
        self.feed = feed or Feed(self.devices, self.group)
        if isinstance(self.group, LocalGroup):
            return
        if self.group.size > 1:  # all processes have as many devices, and one seed
            with deadline.waiting(self.group.rank, self.group.size, self.group.silent):
                agreement.check_same_count(self.group, len(self.devices), "devices", "devices")
                agreement.synchronize_seed(self.group)
        cluster.on_barrier(self.group.barrier)

    # ---- replicas ----

    @abstractmethod
    def run(self, fn: ReplicaFn) -> Any:
        """Calls `fn(index)` on every replica of this process, with indices from 0.

        Returns:
            The results, to be passed to `update` or `local_results`.
        """

    @abstractmethod
    def local_results(self, results: Any) -> list[Any]:
        """Returns what `run` returned as a list with one result per replica of this process."""

    @abstractmethod
    def update(self, fn: Callable[[Any], Any], results: Any) -> list[Any]:
        """Calls `fn(result)` once for each set of the variables, with its own replica's result.

        Inside, assigning to a variable changes that set alone, without any exchange.

        Returns:
            The tensor, or None, that each call returned.
        """

    @abstractmethod
    def all_reduce(self, tensors: list) -> list:
        """Returns tensors summed over the replicas of all processes; called on a replica.

        Args:
            tensors: Dense tensors or `tf.IndexedSlices`, of the same shapes on every replica.
        """

    @property
    def num_local_replicas(self) -> int:
        """Number of replicas of this process."""
        return self.feed.num_shares

    @property
    def num_replicas(self) -> int:
        """Number of replicas of all processes."""
        return self.num_local_replicas * self.group.size

    @property
    def first_replica(self) -> int:
        """Index, among all replicas, of the first one of this process."""
        return self.num_local_replicas * self.group.rank

    def gradients(
        self, tape: tf.GradientTape, loss: tf.Tensor, sources: Sequence[Any], alone: bool = False
    ) -> list:
        """Returns the gradients of a replica's part of the loss; called on a replica.

        Args:
            tape: The tape that recorded the loss.
            loss: A scalar, or a tensor of which the sum is meant.
            sources: Variables and tensors that the loss may depend on.
            alone: Whether this replica computes the full batch, and the others nothing.

        Returns:
            For each source a dense tensor, `tf.IndexedSlices`, or None if the loss does not depend
            on it.
        """
        return tape.gradient(loss, sources)

    def outputs(
        self, fn: Callable[[batches.Batch], Any], element: batches.Element, whole: bool = False
    ) -> list[Any]:
        """Calls `fn` on the rows of every replica, to compute outputs of a model.

        Args:
            fn: Computes the outputs of rows.
            element: An element of a distributed data set.
            whole: As for `Feed.distribute`; one replica then computes all rows.

        Returns:
            The results. Concatenated, they are the outputs of this process's rows, in order.
        """
        if whole:  # called once, so that it updates state once
            with tf.device(self.devices[0]):
                return [fn(element.shares[0].rows)]
        if self.num_replicas == 1:
            return self.local_results(self.run(lambda i: fn(element.shares[i].rows)))

        def on_replica(i: int) -> Any:
            return batches.drop_padding(fn(element.shares[i].rows), element.shares[i].num_rows)

        return self.local_results(self.run(on_replica))

    def check_custom_step(self, step: str) -> None:
        """Raises an error if the strategy cannot run a custom step, such as `"Net.train_step"`."""
        del step

    # ---- processes ----

    def translate_errors(self) -> AbstractContextManager[None]:
        """Returns a context that reports errors caused by a lost process or server as such."""
        return connection.watched()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """A context in which model and optimizer are created; it places their variables."""
        with self.variables.scope():
            yield

    # ---- tables ----

    def describe(self) -> dict[str, str]:
        """Returns this strategy's rows of the start-up table."""
        on_cpu = all(device.startswith("CPU") for device in self.devices)
        logical = " (logical CPU devices, because there are no GPUs)" if on_cpu else ""
        rows = {
            "strategy": self.name,
            "devices": ", ".join(map(connection.short, self.devices)) + logical,
            "replicas": str(self.num_replicas),
            "shard policy": "each global batch is split over the replicas",
        }
        if isinstance(self.group, LocalGroup):
            rows |= cluster.current().describe_environments()
        else:
            rows |= cluster.current().describe() | self.group.describe()
        return rows | self.variables.describe()

    def summary(self) -> dict[str, str]:
        """Returns this strategy's rows of the table at the end of a training."""
        return {}


# ---- the processes of a strategy ----


def join_processes(
    process_group: str, devices: int | str | Sequence[str] | None, default_cpus: int
) -> tuple[list[str], ProcessGroup]:
    """Returns the devices of this process, and the processes that train together.

    A process that no launcher started trains alone. With Horovod, the GPUs of a host are divided
    among its processes.

    Args:
        process_group: `"horovod"`, `"tensorflow"` (TensorFlow's collectives) or `"auto"`, which is
            Horovod.
        devices: As for `tfdist.devices.resolve`.
        default_cpus: As for `tfdist.devices.resolve`.

    Raises:
        DeviceError: A device that does not exist.
        MissingError: Horovod is not installed.
        ClusterError: The processes do not come together.
    """
    if cluster.started_together() is None:
        return resolve(devices, default_cpus), LocalGroup()
    if process_group == "tensorflow":
        joined = CollectiveGroup(devices, default_cpus=default_cpus)
        return joined.devices, joined
    group = HorovodGroup()
    limit_visible_gpus(group.local_rank, group.local_size)
    return resolve(devices, default_cpus), group
