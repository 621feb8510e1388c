"""Replicas of one process whose graphs are traced in turns, so that they can exchange sums.

They are built one after the other, each in a thread of its own; where one exchanges sums it pauses
until all the others have come to the same place. The threads exist only while the graph is built:
what runs is one graph with all the replicas in it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.strategies.base import ReplicaFn


class ReplicaThreads:
    """The replicas that are being traced, if any are."""

    def __init__(self) -> None:
        self._running: list[_Thread] = []

    def run(
        self, fn: ReplicaFn, devices: Sequence[str], add_up: Callable[[list[list]], list]
    ) -> list[Any]:
        """Calls `fn(index)` once for each of the devices, on it, and returns the results.

        Args:
            fn: May call `exchange`, as often on every replica.
            devices: One a replica.
            add_up: Makes of the tensors of each replica those that all are given.
        """
        self._running = [_Thread(fn, i, device) for i, device in enumerate(devices)]
        try:
            while True:
                asked = [thread.advance() for thread in self._running]
                if not any(asked):
                    return [thread.result for thread in self._running]
                sums = add_up(asked)
                for thread in self._running:
                    thread.reply = sums
        finally:
            for thread in self._running:
                thread.close()
            self._running = []

    def index(self) -> int | None:
        """Returns the replica that is traced in the calling thread; None: it is no replica's."""
        here = threading.current_thread()
        return next((i for i, own in enumerate(self._running) if own.thread is here), None)

    def exchange(self, tensors: list) -> list:
        """Returns what `add_up` makes of tensors; called on every replica, with at least one."""
        index = self.index()
        if index is None:
            raise RuntimeError("exchange is called on replicas alone")
        return self._running[index].exchange(tensors)


class _Thread:
    """One replica's function, which stops wherever it exchanges sums."""

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
        """Pauses the replica until the sums are there; called in its thread."""
        self._asked = tensors
        self._paused.release()
        self._go.acquire()
        if self._closing:
            raise InterruptedError("another replica failed")
        return self.reply

    def close(self) -> None:
        """Ends a thread that waits for replicas that will not come."""
        self._closing = True
        self._go.release()
        self.thread.join()
