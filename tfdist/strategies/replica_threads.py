"""Traces the replicas of one process in turns, so that they can exchange sums.

Each replica is traced in a thread of its own, one at a time. Where it exchanges sums it pauses
until all others have reached the same point. The threads exist only while the graph is built: what
runs is one graph with all replicas in it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import tensorflow as tf

from tfdist.strategies.base import ReplicaFn
from tfdist.upstream.tensorflow_graphs import current_graph
from tfdist.upstream.tensorflow_random import RandomStates
from tfdist.upstream.tensorflow_runtime import summaries_of_this_thread


class ReplicaThreads:
    """The replicas that are being traced, if any."""

    def __init__(self) -> None:
        self._running: list[_Thread] = []

    def run(
        self, fn: ReplicaFn, devices: Sequence[str], reduce: Callable[[list[list]], list]
    ) -> list[Any]:
        """Calls `fn(index)` on each device, and returns the results.

        Args:
            fn: May call `exchange`, the same number of times on every replica.
            devices: One for each replica.
            reduce: Maps the tensors of all replicas to those that each replica gets.
        """
        self._running = [_Thread(fn, i, device) for i, device in enumerate(devices)]
        try:
            while True:
                # Python code draws the same numbers on every replica, and goes on from the first.
                states = after = RandomStates.current()
                terms = []
                for index, thread in enumerate(self._running):
                    states.restore()
                    terms.append(thread.advance())
                    after = after if index else RandomStates.current()
                after.restore()
                if not any(terms):
                    return [thread.result for thread in self._running]
                sums = reduce(terms)
                for thread in self._running:
                    thread.reply = sums
        finally:
            for thread in self._running:
                thread.close()
            self._running = []

    def index(self) -> int | None:
        """Returns the replica that the calling thread traces; None if it traces none."""
        here = threading.current_thread()
        return next((i for i, one in enumerate(self._running) if one.thread is here), None)

    def exchange(self, tensors: list) -> list:
        """Returns what `reduce` returns for tensors, at least one; called on every replica."""
        index = self.index()
        if index is None:
            raise RuntimeError("exchange is called on replicas only")
        return self._running[index].exchange(tensors)


class _Thread:
    """One replica's function, which pauses wherever it exchanges sums."""

    def __init__(self, fn: ReplicaFn, index: int, device: str) -> None:
        self.result: Any = None
        self.reply: list = []
        self._asked: list = []
        self._error: BaseException | None = None
        self._closing = False
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        graph = current_graph()
        # The writer of summaries belongs to the caller's thread. As in TensorFlow's strategies, the
        # first replica alone writes to it.
        summaries = summaries_of_this_thread() if index == 0 else nullcontext

        def build() -> None:
            self._go.acquire()
            try:
                if self._closing:
                    return
                in_graph = nullcontext() if graph is None else graph.as_default()
                with summaries(), in_graph, tf.device(device):
                    self.result = fn(index)
            except BaseException as error:  # raised again in the caller's thread
                self._error = error
            finally:
                self._asked = []
                self._paused.release()

        self.thread = threading.Thread(target=build, daemon=True)
        self.thread.start()

    def advance(self) -> list:
        """Continues to the next exchange and returns its tensors; none at the end."""
        self._go.release()
        self._paused.acquire()
        if self._error is not None:
            raise self._error
        return self._asked

    def exchange(self, tensors: list) -> list:
        """Pauses the replica until the sums exist; called in its thread."""
        self._asked = tensors
        self._paused.release()
        self._go.acquire()
        if self._closing:
            raise InterruptedError("another replica failed")
        return self.reply

    def close(self) -> None:
        self._closing = True
        self._go.release()
        self.thread.join()
