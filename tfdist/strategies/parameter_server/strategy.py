"""Parameter servers: workers train asynchronously over variables that servers hold.

On `tf.distribute.ParameterServerStrategy` and its `ClusterCoordinator`. One process, the chief,
runs the script; workers and servers do what it says.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfdist import cluster
from tfdist.errors import ClusterError, ConfigurationError
from tfdist.strategies import inner_loop
from tfdist.strategies.base import ReplicaFn, Strategy
from tfdist.strategies.parameter_server import embedding_rows, processes
from tfdist.strategies.parameter_server import loop as ps_loop
from tfdist.strategies.parameter_server.atomic_adds import atomic_adds
from tfdist.strategies.parameter_server.ledger import Ledger
from tfdist.strategies.parameter_server.tasks import find
from tfdist.upstream import tensorflow

_SERVERS = "/job:ps/replica:0"  # in TensorFlow's names of devices


class ParameterServer(Strategy):
    """Asynchronous workers, each of which makes steps on global batches of its own.

    With one worker the numbers are those of one device. With several, gradients are of weights
    that others may have changed meanwhile; counts and metrics stay exact. Evaluation and
    prediction are the chief's.

    The cluster is TF_CONFIG's. In a process that none started it is made in line: workers and
    servers are threads of the process.

    Attributes:
        ledger: What the workers have done.
        num_trainers: How many workers there are. `num_workers` counts the processes that run the
            script together, which is the chief.
        num_servers: How many parameter servers there are.

    Args:
        devices: How many workers an in-line cluster has; None: 2.
        num_servers: How many parameter servers it has; None: 1. Variables go round the servers,
            each to one.
        partitioner: Refused, if any: Keras trains no variable that is cut into several.

    Raises:
        ConfigurationError: Not a number, a number where TF_CONFIG has it, or another cluster than
            the one this process is connected to.
        ClusterError: A cluster without a chief, worker or parameter server.
        SystemExit: In a worker or server, once the chief is done.
    """

    name = "parameter_server"
    has_local_variables = False
    repeatable = False

    def __init__(
        self,
        devices: int | str | Sequence[str] | None = None,
        num_servers: int | None = None,
        partitioner: Any = None,
    ) -> None:
        if partitioner is not None:
            raise ConfigurationError(
                "partitioner: Keras takes no gradient of a variable that is cut over servers. "
                "Leave it out: of an Embedding only a batch's rows are sent; cut a table that no "
                "server can hold into several Embedding layers."
            )
        self.devices = ["CPU:0"]  # of a step: each worker makes whole ones by itself
        tasks = find(cluster.current(), devices, num_servers)
        self.tf_strategy = processes.connect(tasks)
        self.num_trainers, self.num_servers = len(tasks["worker"]), len(tasks["ps"])
        # In a notebook TensorFlow tells each wait of it, and its end when nobody can hear any more.
        tf.get_logger().setLevel(max(tf.get_logger().level, logging.WARNING))
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self.tf_strategy)
        self._next_server = itertools.cycle(range(self.num_servers))
        self.ledger = Ledger()
        cluster.on_barrier(self.barrier)
        self.writes_alone = self.num_trainers == 1
        if not self.writes_alone:
            self.inexact = {
                "asynchronous workers": "a gradient is of weights that others may have changed "
                "since; what is no sum (moving statistics) is that of the last to write"
            }

    @property
    def first_replica(self) -> Any:
        """A number of its own for each step, so that no two workers draw the same mask."""
        return 0 if self.writes_alone else self.ledger.ticket

    def describe(self) -> dict[str, str]:
        return {
            "strategy": self.name,
            "workers": f"{self.num_trainers}, asynchronous",
            "parameter servers": str(self.num_servers),
            "shard policy": "each global batch goes to one worker",
        }

    def summary(self) -> dict[str, str]:
        return self.ledger.summary()

    @contextmanager
    def scope(self) -> Iterator[None]:
        with tf.variable_creator_scope(self._on_server):
            yield

    def _on_server(self, next_creator: Callable[..., Any], **options: Any) -> Any:
        """Makes a variable on the next server; an optimizer's is with the weight that it is for."""
        if _SERVERS in tensorflow.current_device():
            return next_creator(**options)
        with tf.device(f"{_SERVERS}/task:{next(self._next_server)}/device:CPU:0"):
            return next_creator(**options)

    def owns(self, variable: tf.Variable) -> bool:
        return _SERVERS in variable.device

    def prepare(self, model: Any, optimizers: Sequence[Any]) -> None:
        inner = [getattr(optimizer, "inner_optimizer", optimizer) for optimizer in optimizers]
        steps = max((o.gradient_accumulation_steps or 0 for o in inner), default=0)
        if steps and not self.writes_alone:
            raise ConfigurationError(
                f"gradient_accumulation_steps={steps} counts batches "
                "that asynchronous workers would mix up: use accumulate in the Trainer."
            )

    def run(self, fn: ReplicaFn) -> Any:
        with embedding_rows.sent_alone():
            return fn(0)

    def update(self, fn: Callable[[Any], Any], results: Any) -> list[Any]:
        with atomic_adds():
            return [fn(results)]

    def compile(
        self,
        step: inner_loop.Step,
        eager: bool = False,
        may_end: bool = True,
        own_rows: bool = False,
    ) -> inner_loop.LoopFn:
        if eager or not step.training:
            return super().compile(step, eager, may_end, own_rows)
        return ps_loop.asynchronous(
            self.unpack, step, self.ledger, self._coordinator, self.num_trainers
        )

    def join(self) -> None:
        self._coordinator.join()

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        try:
            yield
        except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
            # The coordinator takes care of a worker itself, so it is a server's.
            raise ClusterError(
                f"A parameter server and its variables are gone ({str(error).splitlines()[0]}): "
                "start the cluster again; a checkpoint goes on from the last one saved."
            ) from error
