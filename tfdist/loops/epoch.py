"""One pass over the data: calls of the inner loop, and what callbacks hear of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import DataError, NonFiniteError
from tfdist.loops import interrupts
from tfdist.loops.feed import Feed
from tfdist.loops.steps_per_call import Pace
from tfdist.strategies.base import Strategy
from tfdist.strategies.inner_loop import Logs, Made

#: Makes up to that many steps: what was done, and the logs after them.
Call = Callable[[Iterator[Any], int], tuple[Made, Logs]]


def run(
    call: Call,
    feed: Feed,
    pace: Pace,
    gather: Callable[[Sequence[float]], np.ndarray],
    begin: Callable[[int], None],
    end: Callable[[int, Made, float, Logs], bool],
) -> Logs:
    """Makes the steps of an epoch, the same on every worker.

    Args:
        call: The inner loop.
        feed: Where the batches come from.
        pace: Chooses how many steps go into a call.
        gather: The strategy's.
        begin: Told of the first step of each call.
        end: Told of the last step of each call, what was made in how many seconds, and the logs;
            returns whether to stop.

    Returns:
        The logs after the last step.

    Raises:
        KeyboardInterrupt: On all workers, after the same step, where one of them was interrupted.
    """
    iterator, step, exhausted, stopped = feed.begin_epoch(), 0, False, False
    logs: Logs = {}
    while (wanted := feed.num_left(step, pace.num_steps)) and not exhausted and not stopped:
        begin(step)
        pace.begin_call()
        made, results = call(iterator, wanted)
        seconds = pace.end_call(made.num_steps)
        step += made.num_steps
        exhausted = made.num_steps < wanted
        if made.num_steps:
            logs = results
            stopped = end(step - 1, made, seconds, logs)
        # One worker's clock, callbacks and Ctrl-C decide for all: none may go on alone.
        told = gather([pace.num_steps, stopped, made.checksum, interrupts.pending()])
        _check_alike(told[:, 2], step)
        if told[:, 3].any():
            raise KeyboardInterrupt
        pace.num_steps, stopped = int(told[0, 0]), bool(told[:, 1].any())
    feed.end_epoch(step, exhausted)
    return logs


def _check_alike(checksums: np.ndarray, step: int) -> None:
    """Checks that all workers were fed the same global batches.

    Raises:
        DataError: They were not.
    """
    others = np.flatnonzero(checksums != checksums[0])
    if len(others):
        raise DataError(
            f"Up to step {step} rank {others[0]} was fed other batches than rank 0, so rows were "
            "lost or seen twice: seed what shuffles the data (keras.utils.set_random_seed before "
            "they are made), or pass a function of a tf.distribute.InputContext."
        )


def agree(model: keras.Model, strategy: Strategy) -> None:
    """Shares what callbacks decided, so that workers never part.

    A worker that stops stops all; a learning rate that was set is rank 0's.
    """
    rate = model.optimizer._learning_rate
    settable = isinstance(rate, keras.Variable)
    mine = float(np.asarray(rate.value)) if settable else 0.0
    told = strategy.gather([model.stop_training, mine])
    model.stop_training = bool(told[:, 0].any())
    if settable and told[0, 1] != mine:
        model.optimizer.learning_rate = told[0, 1]


def check_first_loss(feed: Feed, logs: Logs) -> None:
    """Checks the logs of the very first call.

    Raises:
        NonFiniteError: The loss is NaN or infinite, and no loss scale may still mend it.
    """
    loss = logs.get("loss", 0.0)
    if math.isfinite(loss) or "loss_scale" in logs:
        return
    leaves = tf.nest.flatten(feed.first_batch(), expand_composites=True)
    arrays = [np.asarray(leaf) for leaf in leaves]
    bad = sum(int(np.sum(~np.isfinite(a))) for a in arrays if a.dtype.kind == "f")
    raise NonFiniteError(
        f"The loss of the first batch is {loss}. "
        + (
            f"{bad} values of a batch are NaN or infinite: clean the data."
            if bad
            else "Its data are finite, unless they were shuffled: lower the learning rate, "
            "check the loss, or look for NaN in the data."
        )
    )
