"""The Ray actor of one worker: runs the worker's process on its node, and relays its output."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import queue
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import ray

from tfdist.cluster.launcher import plan
from tfdist.cluster.launcher.orphans import marked, watching
from tfdist.cluster.launcher.plan import LOCAL, Process, Slot
from tfdist.cluster.launcher.processes import Child, LocalChild, Streams
from tfdist.cluster.networks import check_own_name, free_ports, interface_towards
from tfdist.ray.reports import Blocks, Channel, End, Line, Message


class Node(NamedTuple):
    """The node of an actor.

    Attributes:
        address: The node's IP address.
        node_id: Ray's ID of the node.
        ports: Two free ports: one for the worker, and one for Horovod's rendezvous.
    """

    address: str
    node_id: str
    ports: tuple[int, int]


class Host:
    """Runs one worker at a time. All methods except `run` return immediately.

    Args:
        folder: The launcher's working directory. The worker uses it if the node has it.
        import_path: The launcher's `PYTHONPATH`.
    """

    def __init__(self, folder: str, import_path: str) -> None:
        if Path(folder).is_dir():
            os.chdir(folder)
        paths = filter(None, [import_path, os.environ.get("PYTHONPATH")])
        self._environ = {"PYTHONPATH": os.pathsep.join(paths)}
        self._serving = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._child: LocalChild | None = None
        self._signals: list[int] = []

    def node(self) -> Node:
        """Returns the node that this actor runs on."""
        worker_port, rendezvous_port = free_ports(2)
        node_id = ray.get_runtime_context().get_node_id()
        return Node(ray.util.get_node_ip_address(), node_id, (worker_port, rendezvous_port))

    def horovod_variables(self, rank_0: str) -> dict[str, str]:
        """Returns variables of Horovod's Gloo that depend on this node."""
        if rank_0 == LOCAL:
            return {}
        return {"HOROVOD_GLOO_IFACE": interface_towards(rank_0)}

    def check_host_name(self) -> None:
        """Checks that Horovod's Gloo can connect to this node from others.

        Raises:
            ClusterError: This node's name resolves to an address that other nodes cannot reach.
        """
        check_own_name(is_alone=False)

    def serve_rendezvous(self, slots: Sequence[Slot], port: int) -> None:
        """Serves Horovod's rendezvous until this actor ends, if Horovod is installed."""
        if plan.horovod_installed():
            self._serving.enter_context(plan.horovod_rendezvous(slots, port))

    def run(
        self,
        process: Process,
        environ: Mapping[str, str],
        function: bytes = b"",
        datasets: Mapping[str, Blocks] = MappingProxyType({}),
    ) -> Iterator[list[Message]]:
        """Runs the worker, and yields its messages in batches; the last one is an `End`.

        Args:
            process: The worker. If its program is `python`, the interpreter of this actor runs it.
            environ: Variables of all workers.
            function: A pickled function for the worker to call, if it runs `tfdist.ray.worker`.
            datasets: Executed Ray datasets by name, for the function to read.
        """
        messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        streams = Streams(process.name, _Lines(messages, False), _Lines(messages, True))
        mark = uuid.uuid4().hex
        with contextlib.ExitStack() as stack:
            shared = {**self._environ, **environ, **marked(mark)}
            if function:
                channel = stack.enter_context(Channel(function, messages.put, datasets))
                shared |= channel.environ
            stack.enter_context(watching(mark))
            program, *arguments = process.command
            program = sys.executable if program == "python" else program
            child = LocalChild(replace(process, command=(program, *arguments)), shared, streams)
            with self._lock:
                child.start(functools.partial(_put_end, messages))
                self._child = child
                for number in self._signals:
                    child.signal(number)
            while True:
                # All messages in the queue; an `End` is always the last.
                batch = [messages.get()]
                while not isinstance(batch[-1], End):
                    try:
                        batch.append(messages.get_nowait())
                    except queue.Empty:
                        break
                yield batch
                if isinstance(batch[-1], End):
                    return

    def signal(self, number: int) -> None:
        """Sends a signal to the worker, or to one that has not started yet as soon as it runs."""
        with self._lock:
            if self._child is None:
                self._signals.append(number)
            else:
                self._child.signal(number)


def _put_end(messages: queue.SimpleQueue[Message], child: Child) -> None:
    _, code, error_output, _ = child.failure()  # waits for the remaining output
    messages.put(End(code, error_output))


class _Lines(io.StringIO):
    """A stream whose complete lines become messages."""

    def __init__(self, messages: queue.SimpleQueue[Message], is_error: bool) -> None:
        super().__init__()
        self._messages, self._is_error = messages, is_error
        self._partial_line = ""

    def write(self, text: str) -> int:
        """Writes text of any length; callers hold the lock of `launcher.output.Relay`."""
        complete, newline, self._partial_line = (self._partial_line + text).rpartition("\n")
        if newline:
            self._messages.put(Line(complete + newline, self._is_error))
        return len(text)
