"""The interface of a strategy; the base class is one device.

A step has two halves. On each *replica* a function computes sums over the rows of its share and
exchanges them (`run`, `all_reduce`). Then, for each *copy* of the variables, another applies them
(`update`): there the Keras optimizer runs as it does on one device. The loop over the steps lies
inside one `tf.function` (`compile`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import tensorflow as tf

from tfdist import cluster
from tfdist.devices import resolve
from tfdist.errors import ConfigurationError
from tfdist.strategies import loop, shares

#: Takes a replica's index, a Python int, and returns a structure of tensors.
ReplicaFn = Callable[[int], Any]


class Step(Protocol):
    """What `compile` makes a loop of; called outside of the replicas."""

    def __call__(self, total_rows: tf.Tensor, parts: Sequence[shares.Batch]) -> Any:
        """Makes one step on the shares of one global batch of `total_rows` rows.

        Returns tensors that are ready when the step has been made.
        """

    def logs(self) -> loop.Logs:
        """Returns what is known after the steps: metrics over all of them."""


class Strategy:
    """Computes on one device.

    Attributes:
        name: What the command line calls it.
        devices: Names of the devices of this process, one a replica.
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
    #: Whether a replica finds its variables on its own device, as XLA needs them.
    has_local_variables = True
    #: What this strategy cannot compute to the numbers of one device, and why.
    inexact: ClassVar[dict[str, str]] = {}

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
        return len(self.devices)

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one that writes and talks."""
        return cluster.is_chief()

    def describe(self) -> dict[str, str]:
        """Returns what the start-up table says of this strategy."""
        on_cpu = all(device.startswith("CPU") for device in self.devices)
        stand_in = " (logical CPU devices, for want of GPUs)" if on_cpu else ""
        return {
            "strategy": self.name,
            "devices": ", ".join(self.devices) + stand_in,
            "replicas": str(self.num_replicas),
        }

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Model and optimizer are created inside: it places their variables."""
        with tf.device(self.devices[0]):
            yield

    def owns(self, variable: tf.Variable) -> bool:
        """Tells whether a variable was created in a scope of this strategy, or could have been."""
        return not isinstance(variable, tf.distribute.DistributedValues)

    def distribute(
        self, dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset]
    ) -> tf.data.Dataset:
        """Turns a data set of global batches into one of `(num_rows, shares)`.

        Args:
            dataset_fn: Returns the data set of this worker, given its place among the workers.
        """
        context = tf.distribute.InputContext(1, 0, self.num_replicas)
        dataset = dataset_fn(context).map(self._shares_of, tf.data.AUTOTUNE, deterministic=True)
        if self.num_replicas == 1 and self.devices[0].startswith("GPU"):
            return dataset.apply(tf.data.experimental.prefetch_to_device(self.devices[0]))
        return dataset.prefetch(tf.data.AUTOTUNE)

    def _shares_of(self, *batch: shares.Batch) -> tuple[tf.Tensor, tuple[shares.Batch, ...]]:
        """One element of the distributed data set."""
        whole = shares.without_optionals(batch[0] if len(batch) == 1 else batch)
        return shares.num_rows(whole), shares.split(whole, self.num_replicas)

    def unpack(self, element: Any) -> tuple[tf.Tensor, Sequence[shares.Batch]]:
        """Returns the rows of the global batch and the shares by replica."""
        return element

    def prepare(self, model: Any, optimizer: Any) -> None:
        """Makes the state of all workers the same before the first step."""

    def run(self, fn: ReplicaFn) -> Any:
        """Calls `fn(index)` on every replica.

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

    def compile(self, step: Step, eager: bool = False, may_end: bool = True) -> loop.Run:
        """Returns a function that makes many steps in one call.

        Args:
            step: Called outside of the replicas, on each global batch.
            eager: Whether the loop runs in Python.
            may_end: Whether the data may end before the steps asked for.
        """

        def on_element(element: Any) -> tuple[tf.Tensor, Any]:
            rows, parts = self.unpack(element)
            return rows, step(rows, parts)

        if eager:
            return loop.eager(on_element, step.logs)
        return loop.in_graph(on_element, step.logs, may_end)

    def join(self) -> None:
        """Waits for what is asynchronous; nothing here."""
