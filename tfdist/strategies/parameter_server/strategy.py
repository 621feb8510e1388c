"""Parameter servers: workers train asynchronously on variables that servers hold.

On `tf.distribute.ParameterServerStrategy` and its `ClusterCoordinator`. One process, the chief,
runs the script; workers and servers do what it tells them.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist import cluster
from tfdist.errors import ClusterError, ConfigurationError, first_line
from tfdist.groups.base import LocalGroup, ProcessGroup
from tfdist.strategies.base import ReplicaFn, Strategy
from tfdist.strategies.parameter_server.cluster import connect, find_tasks
from tfdist.strategies.parameter_server.loop import AsynchronousFeed, Ledger
from tfdist.strategies.variables import VariableLayout
from tfdist.upstream import keras_model, tensorflow_runtime
from tfdist.upstream.keras_optimizers import unwrapped
from tfdist.upstream.patching import all_replaced

_SERVERS = "/job:ps/replica:0"  # in TensorFlow's names of devices


class ParameterServer(Strategy):
    """Asynchronous workers that each make steps on global batches of their own.

    With one worker the results match one device. With several, a gradient belongs to weights that
    others may have changed meanwhile; counts and metrics stay exact. The chief evaluates and
    predicts.

    TF_CONFIG defines the cluster. In a process that no launcher started, workers and servers are
    threads of the process.

    Example:
        >>> from tfdist.strategies.parameter_server.strategy import ParameterServer
        >>> trainer = tfdist.Trainer(build_model, strategy=ParameterServer(2, num_servers=1))
        >>> trainer.strategy.num_trainers
        2

    Attributes:
        ledger: What the workers have done.
        num_trainers: The number of workers. `num_workers` counts the processes that run the script,
            which is the chief alone.
        num_servers: The number of parameter servers.

    Args:
        devices: The number of workers of an in-process cluster; None: 2.
        num_servers: The number of its parameter servers; None: 1. Each variable is on one server,
            in turn.
        partitioner: Refused: Keras trains no variable that is split into several.

    Raises:
        ConfigurationError: An invalid number, a number that TF_CONFIG sets already, or another
            cluster than the one this process is connected to.
        ClusterError: A cluster without a chief, worker or parameter server.
        SystemExit: In a worker or server, when the chief is done.
    """

    name = "parameter_server"

    def __init__(
        self,
        devices: int | str | Sequence[str] | None = None,
        num_servers: int | None = None,
        partitioner: Any = None,
    ) -> None:
        if partitioner is not None:
            raise ConfigurationError(
                "partitioner is not supported, because Keras computes no gradients for variables "
                "that are split over servers. Remove it: of an Embedding, only the rows of a batch "
                "are sent. Split tables that are too large for a server into several Embeddings."
            )
        tasks = find_tasks(cluster.current(), devices, num_servers)
        self.tf_strategy = connect(tasks)
        self.num_trainers, self.num_servers = len(tasks["worker"]), len(tasks["ps"])
        # In a notebook TensorFlow would log each wait, and its end when output is closed already.
        tf.get_logger().setLevel(max(tf.get_logger().level, logging.WARNING))
        coordinator = tf.distribute.coordinator.ClusterCoordinator(self.tf_strategy)
        self.ledger = Ledger()
        # The device of a step: each worker makes whole steps by itself.
        device, group = ["CPU:0"], LocalGroup()
        feed = AsynchronousFeed(device, group, self.ledger, coordinator, self.num_trainers)
        variables = ServedVariables(device, group, self.num_servers, self.num_trainers == 1)
        super().__init__(device, group, variables, feed)
        cluster.on_barrier(self.group.barrier)
        if self.num_trainers > 1:
            self.inexact = {
                "asynchronous workers": "a gradient may belong to weights that others have changed "
                "since; moving statistics are those of the last worker that wrote"
            }

    @property
    def first_replica(self) -> Any:
        """A different number for each step, so that no two workers draw the same mask."""
        return 0 if self.variables.writes_alone else self.ledger.ticket

    def describe(self) -> dict[str, str]:
        return {
            "strategy": self.name,
            "workers": f"{self.num_trainers}, asynchronous",
            "parameter servers": str(self.num_servers),
            "shard policy": "each global batch goes to one worker",
        }

    def summary(self) -> dict[str, str]:
        return self.ledger.summary()

    def run(self, fn: ReplicaFn) -> Any:
        with fetch_rows_only():
            return fn(0)

    def local_results(self, results: Any) -> list[Any]:
        return [results]

    def all_reduce(self, tensors: list) -> list:
        return tensors

    def update(self, fn: Callable[[Any], Any], results: Any) -> list[Any]:
        with atomic_adds():
            return [fn(results)]

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        try:
            yield
        except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
            # The coordinator handles lost workers itself, so a server is lost.
            raise ClusterError(
                f"A parameter server and its variables are gone ({first_line(error)}): "
                "start the cluster again to resume from the last checkpoint."
            ) from error


class ServedVariables(VariableLayout):
    """Each variable on one parameter server, in turn."""

    are_local = False

    def __init__(
        self, devices: Sequence[str], group: ProcessGroup, num_servers: int, writes_alone: bool
    ) -> None:
        super().__init__(devices, group)
        self.writes_alone = writes_alone
        self._next_server = itertools.cycle(range(num_servers))

    def scope(self) -> AbstractContextManager[Any]:
        return tf.variable_creator_scope(self._on_server)

    def _on_server(self, next_creator: Callable[..., Any], **options: Any) -> Any:
        """Creates a variable on the next server; optimizer state is with its weight."""
        if _SERVERS in tensorflow_runtime.current_device():
            return next_creator(**options)
        with tf.device(f"{_SERVERS}/task:{next(self._next_server)}/device:CPU:0"):
            return next_creator(**options)

    def owns(self, variable: tf.Variable) -> bool:
        return _SERVERS in variable.device

    def prepare(self, model: Any, optimizers: Sequence[Any]) -> None:
        inner = [unwrapped(optimizer) for optimizer in optimizers]
        steps = max((o.gradient_accumulation_steps or 0 for o in inner), default=0)
        if steps and not self.writes_alone:
            raise ConfigurationError(
                f"gradient_accumulation_steps={steps} counts batches, which asynchronous workers "
                "would mix: use accumulate in the Trainer."
            )


def atomic_adds() -> AbstractContextManager[None]:
    """Returns a context in which `assign_add` and `assign_sub` of Keras's variables are atomic.

    Keras reads, adds and writes, so that what others add in between is lost: of 200 steps by two
    workers `optimizer.iterations` counted 175.
    """

    def assign_add(self: Any, value: Any) -> Any:
        return self.value.assign_add(tf.cast(value, self.value.dtype))

    def assign_sub(self: Any, value: Any) -> Any:
        return self.value.assign_sub(tf.cast(value, self.value.dtype))

    return all_replaced(keras.Variable, {"assign_add": assign_add, "assign_sub": assign_sub})


def fetch_rows_only() -> AbstractContextManager[None]:
    """Returns a context in which `keras.layers.Embedding` fetches the rows of a batch only.

    Keras reads the whole variable first, which would be sent over the network for every batch.
    """
    return keras_model.take_replaced_by(_take)


def _take(take: Any, x: Any, indices: Any, axis: int | None = None) -> tf.Tensor:
    is_table = isinstance(x, keras.Variable) and axis == 0 and isinstance(indices, tf.Tensor)
    # If this forward pass has assigned to the variable, no server has the new value.
    if not is_table or keras_model.value_in_scope(x) is not None:
        return take(x, indices, axis)
    rows = tf.where(indices < 0, indices + x.shape[0], indices)  # as Keras does
    return keras_model.rows_of(x, rows)
