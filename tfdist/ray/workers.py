"""Runs workers on a Ray cluster as `launcher.processes` runs them on this host."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from tfdist.cluster.launcher import plan
from tfdist.cluster.launcher.plan import Process
from tfdist.cluster.launcher.processes import Child, Children, Streams, signals_raise
from tfdist.cluster.launcher.restarts import NO_RESTARTS, Failure
from tfdist.cluster.messages import secret_environ
from tfdist.console import threads
from tfdist.errors import PEER_LOST, TfdistError, first_line
from tfdist.ray.host import Host, Node
from tfdist.ray.placement import Extension, Placement, Resources, reserved
from tfdist.ray.reports import Blocks, End, Line, Message

_LOG = logging.getLogger("tfdist.launch")

#: Time for actors to start on their nodes.
_START_SECONDS = 120.0
#: Interval at which a run with fewer than the maximum number of workers checks for resources.
_GROWTH_SECONDS = 30.0


@dataclass(frozen=True)
class Job:
    """What the workers run, and with which resources.

    Attributes:
        command: Program and arguments of each worker; `python` is the interpreter of its node.
        resources: Resources of each worker.
        min_workers: Minimum number of workers.
        max_workers: Maximum number of workers.
        grace: Seconds for workers to save and exit after an interrupt or a preemption.
        by_horovod: Whether Horovod's Gloo connects the workers.
        function: Pickled function that the workers call; empty if the command needs none.
        datasets: Executed Ray datasets by name, for the function to read.
        on_message: Called with each report and result of a worker, from threads.
        streams: Where output goes.
    """

    command: tuple[str, ...]
    resources: Resources
    min_workers: int
    max_workers: int
    grace: float = 15.0
    by_horovod: bool = False
    function: bytes = b""
    datasets: Mapping[str, Blocks] = field(default_factory=dict)
    on_message: Callable[[Message], None] = lambda _: None
    streams: Streams = field(default_factory=Streams)


def run(job: Job) -> Failure | None:
    """Runs the workers until all have ended. If one fails, the others are terminated.

    With fewer than `job.max_workers`, all workers stop after a step as soon as the cluster has
    resources for another one.

    Returns:
        The first failure or preemption, or None.

    Raises:
        KeyboardInterrupt: SIGINT was received. All workers have ended.
        SystemExit: SIGTERM, SIGUSR1 or SIGHUP was received. All workers have ended.
        LaunchError: The cluster lacks resources, or a worker cannot be started.
    """
    try:
        return _run(job)
    except RayError as error:  # a node or an actor was lost before its worker ran
        cause = getattr(error, "cause", None)
        if isinstance(cause, TfdistError):  # raised by an actor
            raise cause from error
        message = (
            f"The workers did not start in the Ray cluster ({_summary(error)}): check that its "
            "nodes are up, and that tfdist is installed on all of them."
        )
        return Failure("launcher", PEER_LOST, message)


def _run(job: Job) -> Failure | None:
    with signals_raise(), reserved(job.resources, job.min_workers, job.max_workers) as placement:
        if job.min_workers < job.max_workers:
            _LOG.warning("Number of workers: %d of at most %d.", placement.size, job.max_workers)
        with _hosts(placement, job.resources) as hosts:
            children = _children(job, hosts)
            with Children(children, job.grace, NO_RESTARTS) as group:
                group.start()
                if placement.size == job.max_workers:
                    return group.run()
                extension = Extension(job.resources)
                try:
                    return group.run(_GROWTH_SECONDS, extension.is_granted)
                finally:
                    extension.withdraw()


@dataclass(frozen=True)
class _PlacedHost:
    """An actor, and the node that it runs on."""

    actor: Any
    node: Node


@contextlib.contextmanager
def _hosts(placement: Placement, resources: Resources) -> Iterator[list[_PlacedHost]]:
    """Starts an actor for each worker within the block. Actors on the same node are consecutive."""
    host = ray.remote(Host)
    actors = [
        host.options(
            num_cpus=resources.cpus,
            num_gpus=resources.gpus,
            scheduling_strategy=strategy,
            max_concurrency=4,  # signals arrive while a worker runs
        ).remote(str(Path.cwd()), os.environ.get("PYTHONPATH", ""))
        for strategy in placement.strategies
    ]
    try:
        nodes = ray.get([actor.node.remote() for actor in actors], timeout=_START_SECONDS)
        order = {node.address: None for node in nodes}  # addresses in order of their first worker
        hosts = [_PlacedHost(actor, node) for actor, node in zip(actors, nodes, strict=True)]
        yield sorted(hosts, key=lambda host: list(order).index(host.node.address))
    finally:
        for actor in actors:
            with contextlib.suppress(RayError):
                ray.kill(actor)


def _children(job: Job, hosts: Sequence[_PlacedHost]) -> list[RayChild]:
    nodes = [host.node for host in hosts]
    addresses = [node.address for node in nodes]
    if len(set(addresses)) == 1:  # one node: let the servers listen on the loopback address only
        addresses = [plan.LOCAL] * len(addresses)
    slots = plan.slots({address: addresses.count(address) for address in addresses})
    ports = [nodes[0].ports[1], *(node.ports[0] for node in nodes)]
    planned = plan.workers(job.command, slots, ports=ports)
    if job.by_horovod and len(set(addresses)) > 1:
        ray.get([host.actor.check_host_name.remote() for host in hosts])
    ray.get(hosts[0].actor.serve_rendezvous.remote(slots, ports[0]))
    variables = ray.get([host.actor.horovod_variables.remote(addresses[0]) for host in hosts])
    secret = secret_environ()
    return [
        RayChild(process, host, {**secret, **extra}, job)
        for process, host, extra in zip(planned.processes, hosts, variables, strict=True)
    ]


class RayChild(Child):
    """A worker on a node of a Ray cluster."""

    def __init__(
        self, process: Process, host: _PlacedHost, environ: Mapping[str, str], job: Job
    ) -> None:
        self.process, self._host, self._environ, self._job = process, host, environ, job
        self._relay = job.streams.relay(process.name)
        self._end: End | None = None
        self._is_started = False

    def start(self, on_end: Callable[[Child], None]) -> None:
        """Starts the worker. See `Child` for the argument."""
        run_worker = self._host.actor.run.options(num_returns="streaming")
        job = self._job
        batches = run_worker.remote(self.process, self._environ, job.function, job.datasets)
        self._is_started = True

        def follow() -> None:
            try:
                for reference in batches:
                    for message in ray.get(reference):
                        if isinstance(message, End):
                            self._end = message
                        elif isinstance(message, Line):
                            self._relay.write(message.text, message.is_error)
                        else:
                            self._job.on_message(message)
            except RayError as error:
                self._end = self._lost_worker(error)
            on_end(self)

        threads.start(follow)

    @property
    def running(self) -> bool:
        """Whether the worker has been started and has not ended."""
        return self._is_started and self._end is None

    @property
    def code(self) -> int:
        """The exit code of an ended process."""
        return self._end.code if self._end else 0

    def signal(self, number: int) -> None:
        """Sends a signal to the worker and its children."""
        if self.running:
            self._host.actor.signal.remote(number)

    def failure(self) -> Failure:
        """Returns the description of its failure."""
        return Failure(self.process.name, self.code, self._end.error_output if self._end else "")

    def _lost_worker(self, error: RayError) -> End:
        node = self._host.node
        cause = getattr(error, "cause", None)
        if isinstance(cause, TfdistError):  # raised by the actor: the program cannot be started
            return End(1, str(cause))
        return End(
            PEER_LOST,
            f"Lost rank {self.process.name}: the Ray node {node.address} "
            f"({node.node_id[:8]}) or the worker's actor ended ({_summary(error)}).",
        )


def _summary(error: RayError) -> str:
    if cause := getattr(error, "cause", None):
        return f"{type(cause).__name__}: {cause}"
    return first_line(error)
