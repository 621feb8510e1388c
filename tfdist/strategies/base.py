"""The interface of a strategy; the base class is one device.

A step has two halves. On each *replica* a function computes sums over the rows of its share and
exchanges them (`run`, `all_reduce`). Then, for each *copy* of the variables, another applies them
(`update`): there the Keras optimizer runs as it does on one device. The loop over the steps lies
inside one `tf.function` (`compile`). What a process does with others, if it has any, is
`one_worker`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import keras
import tensorflow as tf

from tfdist.devices import resolve
from tfdist.errors import ConfigurationError
from tfdist.strategies import batches, inner_loop
from tfdist.strategies.batches import drop_padding, num_rows
from tfdist.strategies.one_worker import OneWorker

#: Takes a replica's index, a Python int, and returns a structure of tensors.
ReplicaFn = Callable[[int], Any]


class Strategy(OneWorker):
    """Computes on one device.

    Attributes:
        name: What the command line calls it.
        devices: Names of the devices of this process, one a replica.
        num_replicas: Replicas over all workers.

    Args:
        devices: One, as `tfdist.devices.resolve` takes it; None: the first GPU, or the CPU.

    Raises:
        ConfigurationError: More than one device.
        DeviceError: A device that does not exist.
    """

    name = "one_device"
    default_cpus = 1
    #: Whether a replica finds its variables on its own device, as XLA needs them.
    has_local_variables = True
    #: Whether nobody else changes the variables between a step's reading and its writing.
    writes_alone = True
    #: Operations from which on replicas call one function, traced for the first of them; None: each
    #: is traced by itself.
    one_trace_from: int | None = None
    #: Whether the same steps are made in every run, so that runs can be equal to the bit.
    repeatable = True
    #: In what format gradients cross the replicas; None: in their own.
    wire_dtype: tf.DType | None = None
    #: Bytes of gradients that cross together, at most; "auto": by how many there are; None: all.
    bucket_bytes: int | str | None = None
    #: Whether each of them waits until the one before it has crossed.
    buckets_wait = False
    #: What computes a share of a batch, and of what there have to be fewer for fewer shares.
    shares_are = ("replicas", "devices")
    #: What this strategy cannot compute to the numbers of one device, and why.
    inexact: Mapping[str, str] = MappingProxyType({})

    def __init__(self, devices: int | str | Sequence[str] | None = None) -> None:
        self.devices = resolve(1 if devices is None else devices, self.default_cpus)
        if len(self.devices) > 1:
            raise ConfigurationError(
                f"strategy {self.name!r} computes on one a process, but got "
                f"{', '.join(self.devices)}: name one; 'mirrored' and 'multi_worker' take several."
            )

    @property
    def num_replicas(self) -> int:
        """Number of replicas over all workers."""
        return len(self.devices)

    @property
    def num_local_replicas(self) -> int:
        """Number of replicas of this process."""
        return len(self.devices)

    @property
    def first_replica(self) -> int:
        """The number, among all replicas, of this process's first."""
        return 0

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

    def distribute(
        self, dataset: tf.data.Dataset, own_rows: bool = False, whole: bool = False
    ) -> Any:
        """Turns a data set of batches into one of elements that `unpack` takes.

        Args:
            dataset: Of global batches, the same on every worker.
            own_rows: Whether the batches are this worker's rows of the global ones instead. Then
                the data never end; where one worker's do, batches without rows follow.
            whole: Whether every replica is given the whole batch, to compute it as one device.

        Raises:
            UnsupportedModelError: No worker has the whole batch.
        """
        if self.num_replicas == 1 and batches.is_plain(dataset):
            # A function of `tf.data` that cuts nothing would cost more than a tiny network's step.
            return batches.prefetched(dataset, self.devices)
        return batches.distributed(
            dataset, lambda batch: self.split(batch, own_rows, whole), self.devices
        )

    def split(self, batch: batches.Batch, own_rows: bool, whole: bool = False) -> batches.Element:
        """Returns one element of a distributed data set; called in a graph of `tf.data`.

        Args:
            batch: Of the data set that was given to `distribute`.
            own_rows: As there.
            whole: As there.
        """
        num_shares = self.num_local_replicas
        if whole:
            own = batches.uncut(batch, num_shares)
        else:
            own = batches.split(batch, num_shares, range(num_shares))
        return batches.Element(num_rows(batch), tf.constant(0, tf.int64), own)

    def input_context(self) -> tf.distribute.InputContext:
        """Returns what a function that makes this worker's data set is told."""
        return tf.distribute.InputContext(self.num_workers, self.rank, self.num_replicas)

    def unpack(self, element: Any) -> batches.Element:
        """Returns an element of a distributed data set with its shares by replica."""
        if isinstance(element, batches.Element):
            return element
        return self.split(element, own_rows=False)

    def received(self, taken: Any, own_rows: bool) -> batches.Element:
        """Returns an element of a distributed data set, with the rows of its global batch counted.

        Args:
            taken: From the iterator, by every worker.
            own_rows: As `distribute` was told.
        """
        del own_rows
        return self.unpack(taken)

    def place(self, model: Any) -> None:
        """Decides where the parts of a model are, and puts its weights there; nothing here.

        Called when it has been made, and again when it has been built.

        Raises:
            UnsupportedModelError: The strategy cannot compute such a model.
        """

    def making_state(self, model: keras.Model) -> AbstractContextManager[None]:
        """Returns a context in which the state of a model's optimizer is made, in `scope`.

        The weights are there, but not yet those of rank 0.
        """
        del model
        return nullcontext()

    def place_of(self, variable: keras.Variable, index: int) -> str:
        """Returns the device on which a replica of this process has a variable's gradient."""
        del variable
        return self.devices[index]

    def prepare(self, model: Any, optimizers: Sequence[Any]) -> None:
        """Makes the state of all workers that of rank 0, before the first step.

        Raises:
            ClusterError: The workers built different models.
        """

    def sync_copies(self, variables: Sequence[keras.Variable]) -> None:
        """Makes copies of variables equal to the variables themselves, which anybody may change.

        Called before steps, wherever code of the user may have run. There are none here.

        Args:
            variables: All those that steps read and write.
        """

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

    def gradients(self, tape: tf.GradientTape, loss: tf.Tensor, sources: Sequence[Any]) -> list:
        """Returns the gradients of a replica's part of the loss; called on a replica.

        Args:
            tape: Has recorded the loss.
            loss: Scalar, or of any shape, whose sum is meant.
            sources: Variables and tensors that the loss may depend on.

        Returns:
            Of each: a dense tensor, `tf.IndexedSlices`, or None where the loss does not depend
            on it.
        """
        return tape.gradient(loss, sources)

    def all_reduce(self, tensors: list, op: str = "SUM") -> list:
        """Returns tensors reduced over all replicas; called on a replica.

        Args:
            tensors: Dense tensors or `tf.IndexedSlices`; the same shapes on every replica.
            op: `"SUM"` or `"MEAN"`.
        """
        del op
        return tensors

    def check_table(self, table: keras.Variable) -> None:
        """Checks that what has gradients of rows can be trained.

        Raises:
            UnsupportedModelError: It cannot.
        """

    def reduce_sharded(
        self, gradients: Mapping[int, Any], variables: Sequence[keras.Variable]
    ) -> dict[int, Any]:
        """Sums, over all replicas, the gradients that are wanted in another form than whole.

        Called on a replica, before the rest is summed as ever by `all_reduce`; there are none here.

        Args:
            gradients: Of this replica, by place; the same places on every replica.
            variables: What they are of, by place.

        Returns:
            The sums, by place: tensors, or `ShardedGradient` of a variable that is kept in parts.
        """
        del gradients, variables
        return {}

    def any_of_parts(self, flag: tf.Tensor) -> tf.Tensor:
        """Tells whether a flag is true anywhere, where each process has looked at parts of its own.

        Called inside `update`.
        """
        return flag

    def after_update(self, variables: Sequence[keras.Variable]) -> None:
        """Completes what a step has changed; called inside `update`, where it is changed.

        Args:
            variables: Those that the step may have assigned to, and others.
        """

    def compile(
        self,
        step: inner_loop.Step,
        eager: bool = False,
        may_end: bool = True,
        own_rows: bool = False,
    ) -> inner_loop.LoopFn:
        """Returns a function that makes many steps in one call.

        Args:
            step: Called outside of the replicas, on each global batch.
            eager: Whether the loop runs in Python.
            may_end: Whether the data may end before the steps asked for.
            own_rows: As in `distribute`.
        """
        loop = inner_loop.eager if eager else inner_loop.in_graph
        return loop(self.unpack, step, inner_loop.End.OF_ITERATOR if may_end else None)

    def outputs(
        self, fn: Callable[[batches.Batch], Any], element: batches.Element, whole: bool = False
    ) -> list[Any]:
        """Calls `fn` on the rows of every replica, for outputs of a model.

        Args:
            fn: Computes them.
            element: Of a distributed data set.
            whole: As `distribute` was told; then one replica's outputs are those of all rows.

        Returns:
            Its results, which laid end to end are those for the rows that this process has of the
            global batch, in order.
        """
        if whole:  # called once, so that a state which it moves moves once
            with tf.device(self.devices[0]):
                return [fn(element.shares[0].rows)]
        if self.num_replicas == 1:
            return self.local_results(self.run(lambda i: fn(element.shares[i].rows)))

        def on_replica(i: int) -> Any:
            return drop_padding(fn(element.shares[i].rows), element.shares[i].num_rows)

        return self.local_results(self.run(on_replica))

    def join(self) -> None:
        """Waits for what is asynchronous; nothing here."""
