"""One pass over the data: calls of the inner loop, and what callbacks hear of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import NonFiniteError
from tfdist.feed import Feed
from tfdist.pace import Pace
from tfdist.strategies.loop import Logs, Made

#: Makes up to that many steps: what was done, and the logs after them.
Call = Callable[[Iterator[Any], int], tuple[Made, Logs]]


def run(
    call: Call,
    feed: Feed,
    pace: Pace,
    begin: Callable[[int], None],
    end: Callable[[int, Made, float, Logs], bool],
) -> Logs:
    """Makes the steps of an epoch.

    Args:
        call: The inner loop.
        feed: Where the batches come from.
        pace: Chooses how many steps go into a call.
        begin: Told of the first step of each call.
        end: Told of the last step of each call, what was made in how many seconds, and the logs;
            returns whether to stop.

    Returns:
        The logs after the last step.
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
    feed.end_epoch(step, exhausted)
    return logs


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
