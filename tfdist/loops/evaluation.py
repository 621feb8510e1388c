"""An evaluation, the same by itself and within a training."""

from __future__ import annotations

import keras

from tfdist.loops import epoch
from tfdist.loops.epoch import OuterLoop
from tfdist.loops.feed import Feed
from tfdist.strategies.inner_loop import Logs


def run(outer: OuterLoop, feed: Feed, callbacks: keras.callbacks.CallbackList) -> Logs:
    """Returns loss and metrics over a feed, from its beginning.

    Args:
        outer: What all loops of the trainer work with.
        feed: What to evaluate on.
        callbacks: Hear of it as in `keras.Model.evaluate`; may set `stop_evaluating`.
    """
    model = outer.model
    per_call = outer.per_call("test", callbacks, feed)
    steps = outer.functions.evaluate(feed)
    model.stop_evaluating = False
    callbacks.on_test_begin()
    model.reset_metrics()
    feed.restart()
    observers = outer.observers("test", callbacks, "an evaluation")
    logs = epoch.run(steps, feed, per_call, outer.strategy, observers)
    callbacks.on_test_end(logs)
    return logs
