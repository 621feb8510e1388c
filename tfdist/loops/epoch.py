"""One pass over the data: the loop that training, evaluation and prediction share.

A call of the inner loop runs several steps. After each call, observers are notified (callbacks,
watchdog, checkpoints, throughput), and all workers agree whether to continue.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tfdist.errors import DataError
from tfdist.loops import interrupts
from tfdist.loops.data_handler import DataHandler
from tfdist.loops.functions import Steps
from tfdist.loops.steps_per_call import StepsPerCall
from tfdist.strategies.base import Strategy
from tfdist.strategies.inner_loop import Logs, LoopResult


class Call(NamedTuple):
    """A call of the inner loop that ran at least one step.

    Attributes:
        last_step: Number of its last step in the epoch, from 0.
        result: The result of the call.
        seconds: Duration of the call.
        logs: Logs after the last step.
    """

    last_step: int
    result: LoopResult
    seconds: float
    logs: Logs


@dataclass(frozen=True)
class Epoch:
    """A pass over the data.

    Attributes:
        name: What messages call it, such as "epoch 1".
        data: The data.
        is_last: Whether it is the last one of a training.
        save_aside: Saves the state after a call to a folder with a given name beside the
            checkpoints, and returns its path; None if there are no checkpoints.
    """

    name: str
    data: DataHandler
    is_last: bool = False
    save_aside: Callable[[str, Call], str] | None = None


class Observer:
    """Is notified of the calls of an epoch. Methods that are not overridden do nothing."""

    def begin_epoch(self, epoch: Epoch) -> None:
        """Called before the first call of an epoch."""

    def begin_call(self, step: int) -> None:
        """Called before a call, with the number of its first step, from 0."""

    def end_call(self, call: Call) -> None:
        """Called after a call."""

    def max_steps(self) -> int | None:
        """Returns the maximum number of steps of the next call, the same on every worker."""
        return None

    def columns(self, result: LoopResult) -> list[float]:
        """Returns numbers to all-gather after each call.

        All workers return the same number of values.

        Args:
            result: The result of the call, possibly without steps.
        """
        return []

    def compare(self, rows: np.ndarray) -> None:
        """Called with the all-gathered `columns`: one row per worker."""

    def interrupted(self) -> None:
        """Called if the workers stop after the last call, after `end_call` of all observers."""

    def wants_to_stop(self) -> bool:
        """Returns whether to end the epoch after the last call; called after all `end_call`s."""
        return False

    def end_steps(self) -> None:
        """Called after the last call of an epoch that was not interrupted."""


def run(
    steps: Steps,
    epoch: Epoch,
    per_call: StepsPerCall,
    strategy: Strategy,
    observers: Sequence[Observer],
    begin: tuple[int, Logs] = (0, {}),
) -> Logs:
    """Runs the steps of an epoch, the same number on every worker.

    After each call, each of n workers receives about ten numbers from each worker: O(n).

    Raises:
        DataError: The workers got different batches, or there is no data.
        ClusterError: The workers differ in another way; see `rank_checks`.
        KeyboardInterrupt: One worker was interrupted; raised on all workers after the same step.
            `Preempted` if a scheduler preempts the run, `TimeIsUp` if the time limit has passed.
    """
    for observer in observers:
        observer.begin_epoch(epoch)
    data, (step, logs) = epoch.data, begin
    iterator, exhausted, stopped = data.begin_epoch(step, steps.needs_full_batch), False, False
    while not exhausted and not stopped:
        # As many steps as the observers allow and the data have left.
        bounds = [bound for o in observers if (bound := o.max_steps()) is not None]
        num_steps = data.num_left(step, min([per_call.num_steps, *bounds]), per_call.at_once)
        if not num_steps:
            break
        # The call.
        for observer in observers:
            observer.begin_call(step)
        per_call.begin_call()
        with data.naming_records(step, num_steps):
            result, call_logs = steps(iterator, num_steps)
        seconds = per_call.end_call(result.num_steps)
        last = per_call.last_step(step, result.num_steps)
        step += result.num_steps
        exhausted = result.num_steps < num_steps
        if result.num_steps:
            logs = call_logs
            for observer in observers:
                observer.end_call(Call(last, result, seconds, logs))
            stopped = any(observer.wants_to_stop() for observer in observers)
        # The workers agree: the clock of rank 0, and callbacks and signals of any worker, decide.
        state = [per_call.num_steps, stopped, result.checksum, interrupts.pending()]
        columns = [observer.columns(result) for observer in observers]
        all_workers = strategy.group.gather([*state, *itertools.chain.from_iterable(columns)])
        check_same_batches(all_workers[:, 2], step)
        first = len(state)
        for observer, numbers in zip(observers, columns, strict=True):
            if numbers:
                observer.compare(all_workers[:, first : first + len(numbers)])
            first += len(numbers)
        if (pending := int(all_workers[:, 3].max())) != 0:
            for observer in observers:
                observer.interrupted()
            del iterator
            data.discard_iterator()
            raise interrupts.stop(pending)
        per_call.num_steps, stopped = int(all_workers[0, 0]), bool(all_workers[:, 1].any())
    data.end_epoch(step, exhausted, stopped, per_call.at_once)
    per_call.end_pass()
    for observer in observers:
        observer.end_steps()
    return logs


def check_same_batches(checksums: np.ndarray, step: int) -> None:
    """Checks that all workers got the same global batches.

    Raises:
        DataError: The batches differ.
    """
    others = np.flatnonzero(checksums != checksums[0])
    if len(others):
        raise DataError(
            f"Up to step {step}, rank {others[0]} got different batches from rank 0, so rows were "
            "skipped or used twice. Seed the shuffling (keras.utils.set_random_seed before you "
            "create the data) and all generators, remove deterministic=False from maps and "
            "interleaves, or pass a function of a tf.distribute.InputContext."
        )
