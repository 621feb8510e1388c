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

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import keras
import tensorflow as tf

from tfdist import cluster
from tfdist.cluster.remote import connection
from tfdist.cluster.watchdog import device_servers, start_up
from tfdist.groups import agreement
from tfdist.groups.base import LocalGroup, ProcessGroup
from tfdist.strategies import batches
from tfdist.strategies.feed import Feed
from tfdist.strategies.replica_sync import FullReplicaSync, ReplicaSync
from tfdist.upstream.keras_layers import kernels_read_outside_of_xla

#: Takes a replica's index, a Python int, and returns a structure of tensors.
ReplicaFn = Callable[[int], Any]


class Strategy(ABC):
    """Where the replicas of a process compute, and how they exchange sums.

    A subclass implements the four abstract methods and overrides what differs of the others.

    Attributes:
        name: The name on the command line.
        devices: Names of the devices of this process, one for each replica.
        group: The processes that train together.
        feed: The data of this process, and the loop that takes steps on it.

    Args:
        devices: Names of devices.
        group: The processes that train together; None: this process alone.
        feed: How global batches get to the replicas; None: split over the devices.

    Raises:
        ConfigurationError: The processes have different numbers of devices.
    """

    name: str
    #: Logical CPU devices to create if there is no GPU and nobody asks for a number.
    default_cpus = 1
    #: Whether each replica reads its variables on its own device, which XLA requires.
    has_local_variables = True
    #: Whether nothing else changes the variables between a step's reads and its writes.
    writes_alone = True
    #: Number of operations from which on the replicas call one shared traced function; None: each
    #: replica is traced separately.
    one_trace_from: int | None = None
    #: Whether runs make the same steps, so that two runs can be bitwise identical.
    repeatable = True
    #: The number format in which gradients are sent; None: their own.
    wire_dtype: tf.DType | None = None
    #: The largest size of a gradient bucket in bytes; "auto": by the size of all gradients; None:
    #: one bucket.
    bucket_bytes: int | str | None = None
    #: What does not match one device under this strategy, and why.
    inexact: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        devices: Sequence[str],
        group: ProcessGroup | None = None,
        feed: Feed | None = None,
    ) -> None:
        self.devices = list(devices)
        self.group = LocalGroup() if group is None else group
        self.feed = Feed(self.devices, self.group) if feed is None else feed
        self._agree()

    def _agree(self) -> None:
        """Checks that the processes fit together and gives them one seed; all of them call it."""
        group = self.group
        if isinstance(group, LocalGroup):
            return
        if group.size > 1:
            with start_up.waiting(group.rank, group.size, group.silent):
                agreement.check_same_count(group, len(self.devices), "devices", "devices")
                agreement.synchronize_seed(group)
        cluster.on_barrier(group.barrier)

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

    def gradients(self, tape: tf.GradientTape, loss: tf.Tensor, sources: Sequence[Any]) -> list:
        """Returns the gradients of a replica's part of the loss; called on a replica.

        Args:
            tape: The tape that recorded the loss.
            loss: A scalar, or a tensor of which the sum is meant.
            sources: Variables and tensors that the loss may depend on.

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

    def collective_section(self) -> AbstractContextManager[None]:
        """Returns a context in which all processes are known to run the same code."""
        return nullcontext()

    def translate_errors(self) -> AbstractContextManager[None]:
        """Returns a context that reports errors caused by a lost process or server as such."""
        return device_servers.watched()

    # ---- variables ----

    def patched_keras(self) -> AbstractContextManager[None]:
        """Returns a context for each call of a trainer's methods.

        In it, parts of Keras that expect all variables on one device work with this strategy's.
        """
        return nullcontext() if self.has_local_variables else kernels_read_outside_of_xla()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """A context in which model and optimizer are created; it places their variables."""
        with tf.device(self.devices[0]):
            yield

    def owns(self, variable: tf.Variable) -> bool:
        """Returns whether a variable is placed as the scope of this strategy would place it."""
        return not isinstance(variable, tf.distribute.DistributedValues)

    def place(self, model: Any) -> None:
        """Decides on which device each part of a model is, and moves its weights there.

        Called when the model has been created, and again when it has been built.

        Raises:
            UnsupportedModelError: The strategy cannot compute the model.
        """
        del model

    def making_state(self, model: keras.Model) -> AbstractContextManager[None]:
        """Returns a context in which a model's optimizer creates its state, inside `scope`.

        The weights exist, but do not have the values of rank 0 yet.
        """
        del model
        return nullcontext()

    def prepare(self, model: Any, optimizers: Sequence[Any]) -> None:
        """Gives the state of all processes the values of rank 0, before the first step.

        Raises:
            ClusterError: The processes built different models.
        """
        if self.group.size > 1:
            states = [v for optimizer in optimizers for v in optimizer.variables]
            agreement.broadcast_and_check(self.group, model.variables + states)

    def place_of(self, variable: keras.Variable, index: int) -> str:
        """Returns the device on which a replica of this process has a variable's gradient."""
        del variable
        return self.devices[index]

    def sync_copies(self, variables: Sequence[keras.Variable]) -> None:
        """Copies the values of variables to the mirrored variables of the other replicas, if any.

        Called before a step if user code may have changed the variables.

        Args:
            variables: All variables that steps read and write.
        """
        del variables

    def frequent_sync(self, variables: Sequence[keras.Variable]) -> ReplicaSync:
        """Returns a faster alternative to `sync_copies` for repeated calls.

        Args:
            variables: As for `sync_copies`, which was called with them before.
        """
        return FullReplicaSync(functools.partial(self.sync_copies, variables))

    def check_table(self, table: keras.Variable) -> None:
        """Checks that a variable with sparse gradients can be trained.

        Raises:
            UnsupportedModelError: It cannot.
        """
        del table

    def reduce_sharded(
        self, gradients: Mapping[int, Any], variables: Sequence[keras.Variable]
    ) -> dict[int, Any]:
        """Sums, over all replicas, the gradients that are needed in shards.

        Called on a replica, before `all_reduce` sums all others.

        Args:
            gradients: This replica's gradients, by index; the same indices on every replica.
            variables: Their variables, by the same index.

        Returns:
            Sums by index: tensors, or a `ShardedGradient` for a sharded variable.
        """
        del gradients, variables
        return {}

    def any_of_parts(self, flag: tf.Tensor) -> tf.Tensor:
        """Returns whether a flag is true in any process, if each looked at its shards only.

        Called inside `update`.
        """
        return flag

    def after_update(self, variables: Sequence[keras.Variable]) -> None:
        """Completes a step's changes to variables; called inside `update`.

        Args:
            variables: All that the step may have changed, and possibly others.
        """
        del variables

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
            return rows | cluster.current().describe_environments()
        return rows | cluster.current().describe() | self.group.describe()

    def summary(self) -> dict[str, str]:
        """Returns this strategy's rows of the table at the end of a training."""
        return {}
