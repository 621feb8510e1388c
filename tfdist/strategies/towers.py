"""Towers: data parallelism written out, without `tf.distribute`.

One graph a device, all over the same variables, and sums taken on a parameter device: what the
other strategies automate. The towers are built one after the other, each in a thread of its own;
where one exchanges sums it pauses until all the others have come to the same place. The threads
exist only while the graph is built: what runs is one graph with R towers in it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfdist.devices import resolve
from tfdist.strategies.base import ReplicaFn, Strategy
from tfdist.strategies.collectives.fusion import fused
from tfdist.strategies.collectives.local_sum import local_sum


class Towers(Strategy):
    """Synchronous replicas over shared variables.

    Args:
        devices: As `tfdist.devices.resolve` takes them; one tower on each.
        parameter_device: Holds the variables, averages the gradients and applies them.

    Raises:
        DeviceError: A device that does not exist.
    """

    name = "towers"
    default_cpus = 2
    has_local_variables = False

    def __init__(
        self,
        devices: int | str | Sequence[str] | None = None,
        parameter_device: str = "CPU:0",
    ) -> None:
        self.devices = resolve(devices, self.default_cpus)
        (self.parameter_device,) = resolve([parameter_device], self.default_cpus)
        self._towers: list[_Tower] = []

    def describe(self) -> dict[str, str]:
        return super().describe() | {"parameters on": self.parameter_device}

    @contextmanager
    def scope(self) -> Iterator[None]:
        with tf.device(self.parameter_device):
            yield

    def run(self, fn: ReplicaFn) -> list[Any]:
        self._towers = [_Tower(fn, i, device) for i, device in enumerate(self.devices)]
        try:
            while True:
                asked = [tower.advance() for tower in self._towers]
                if not any(asked):
                    return [tower.result for tower in self._towers]
                sums = self._add_up(asked)
                for tower in self._towers:
                    tower.reply = sums
        finally:
            for tower in self._towers:
                tower.close()

    def _add_up(self, asked: list[list]) -> list:
        """Sums over the towers, tensor by tensor, on the parameter device."""
        with tf.device(self.parameter_device):
            return [local_sum(tensors) for tensors in zip(*asked, strict=True)]

    def local_results(self, results: list[Any]) -> list[Any]:
        return results

    def update(self, fn: Callable[[Any], Any], results: list[Any]) -> list[Any]:
        with tf.device(self.parameter_device):
            return [fn(results[0])]

    def all_reduce(self, tensors: list, op: str = "SUM") -> list:
        tower = next(t for t in self._towers if t.thread is threading.current_thread())
        sums = fused(tower.exchange, tensors)
        return sums if op == "SUM" else [total / self.num_replicas for total in sums]


class _Tower:
    """One replica's function, run in a thread that stops wherever it exchanges sums."""

    def __init__(self, fn: ReplicaFn, index: int, device: str) -> None:
        self.result: Any = None
        self.reply: list = []
        self._asked: list = []
        self._error: BaseException | None = None
        self._closing = False
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

        def build() -> None:
            self._go.acquire()
            try:
                if self._closing:
                    return
                if graph is None:
                    with tf.device(device):
                        self.result = fn(index)
                else:
                    with graph.as_default(), tf.device(device):
                        self.result = fn(index)
            except BaseException as error:  # raised again in the caller's thread
                self._error = error
            finally:
                self._asked = []
                self._paused.release()

        self.thread = threading.Thread(target=build, daemon=True)
        self.thread.start()

    def advance(self) -> list:
        """Runs on to the next exchange and returns its tensors; none at the end."""
        self._go.release()
        self._paused.acquire()
        if self._error is not None:
            raise self._error
        return self._asked

    def exchange(self, tensors: list) -> list:
        """Pauses the tower until the sums are there; called in its thread."""
        self._asked = tensors
        self._paused.release()
        self._go.acquire()
        if self._closing:
            raise InterruptedError("another tower failed")
        return self.reply

    def close(self) -> None:
        """Ends a thread that waits for towers that will not come."""
        self._closing = True
        self._go.release()
        self.thread.join()
