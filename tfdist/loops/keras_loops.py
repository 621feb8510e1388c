"""A training: epochs, each followed by an evaluation where one is wanted.

An evaluation, the same by itself and within a training.

A prediction: batch by batch, and the outputs of all batches laid end to end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import NonFiniteError
from tfdist.loops import epoch
from tfdist.loops.checkpointing import CheckpointHooks
from tfdist.loops.data_handler import DataHandler, EpochDataHandlers
from tfdist.loops.epoch import Call, Observer, OuterLoop, Throughput
from tfdist.strategies.base import Strategy
from tfdist.strategies.inner_loop import Logs, LoopResult
from tfdist.upstream import keras_data, keras_optimizers


class Training:
    """The training loop of one trainer.

    Args:
        outer: What all loops of the trainer work with.

    Attributes:
        throughput: Of the epoch that runs.
    """

    def __init__(self, outer: OuterLoop) -> None:
        self._outer = outer
        self.throughput = Throughput()
        self._first_loss = FirstLoss(outer.model)

    def run(
        self,
        feeds: EpochDataHandlers,
        validate: Callable[[keras.callbacks.CallbackList], Logs] | None,
        callbacks: keras.callbacks.CallbackList,
        epochs: tuple[int, int],
        validation_freq: int | Sequence[int],
        saving: CheckpointHooks,
        tell: Callable[[DataHandler], None] | None = None,
    ) -> None:
        """Trains from one epoch up to another.

        Args:
            feeds: What to train on.
            validate: Returns loss and metrics, of which the callbacks hear; None: nothing does.
            callbacks: Hear of everything as in `keras.Model.fit`.
            epochs: The first, which a callback may replace, and the one before which to stop.
            validation_freq: After which epochs to evaluate, as in `keras.Model.fit`.
            saving: Saves the training, and may let it go on where another one was.
            tell: Called with the first data, once it is known how the model is computed.
        """
        outer, model = self._outer, self._outer.model
        feed = feeds.of_epoch(epochs[0])
        per_call = outer.per_call("train", callbacks, feed)
        outer.functions.train(feed)  # what cannot be trained is said before anything begins
        if tell:
            tell(feed)
        model.stop_training = False
        goes_on, progress = saving.begin(callbacks.callbacks, epochs[1]), saving.progress
        callbacks.on_train_begin()
        saving.after_train_begin()
        if not goes_on:
            progress.epoch = keras_data.initial_epoch(model, epochs[0])
        logs: Logs = progress.logs
        while progress.epoch < epochs[1] and not progress.stopped:
            number, place = progress.epoch, f"epoch {progress.epoch + 1}"
            before, feed = feed, feeds.of_epoch(number)
            if feed is not before:
                callbacks.set_params({**callbacks.params, "steps": feed.num_batches})
            callbacks.on_epoch_begin(number)
            model.reset_metrics()
            begin = saving.after_epoch_begin()
            observers = outer.observers(
                "train", callbacks, place, before=[self.throughput],
                after=[self._first_loss, saving],
            )  # fmt: skip
            steps = outer.functions.train(feed)
            logs = epoch.run(steps, feed, per_call, outer.strategy, observers, begin)
            if validate is not None and keras_data.is_validated(model, number, validation_freq):
                with saving.evaluating():
                    logs |= {f"val_{name}": value for name, value in validate(callbacks).items()}
            callbacks.on_epoch_end(number, logs)
            outer.watchdog.passed(f"the end of {place}")
            _agree(model, outer.strategy)
            progress.epoch, progress.stopped = number + 1, model.stop_training
            saving.end_epoch(logs)
        # Of an optimizer that averages weights (EMA), the averages.
        if model.optimizer is not None and model.optimizer.built:
            with keras_optimizers.optimizers_of_one_device():
                model.optimizer.finalize_variable_values(model.trainable_variables)
            outer.strategy.after_update(model.variables)
        callbacks.on_train_end(logs)


class FirstLoss(Observer):
    """Checks the loss after the first call of all, unless a callback has minded it already."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._checked = False

    def begin_epoch(self, feed: DataHandler) -> None:
        self._feed = feed

    def end_call(self, call: Call) -> None:
        if not (self._checked or self._model.stop_training):
            _check_finite(self._feed, call.logs)
        self._checked = True


def _check_finite(feed: DataHandler, logs: Logs) -> None:
    """Checks the loss of the first steps.

    Raises:
        NonFiniteError: It is NaN or infinite, and no loss scale may still mend it.
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


def _agree(model: keras.Model, strategy: Strategy) -> None:
    """Makes what callbacks decided the same on all workers.

    A worker that stops stops all; a learning rate that was set is rank 0's.
    """
    optimizers = keras_optimizers.optimizers_of(model)
    rates = [keras_optimizers.learning_rate_variable(optimizer) for optimizer in optimizers]
    mine = [0.0 if rate is None else float(np.asarray(rate.value)) for rate in rates]
    told = strategy.gather([model.stop_training, *mine])
    model.stop_training = bool(told[:, 0].any())
    for i, (optimizer, rate) in enumerate(zip(optimizers, rates, strict=True)):
        if rate is not None and told[0, i + 1] != mine[i]:
            optimizer.learning_rate = told[0, i + 1]


def evaluate(outer: OuterLoop, feed: DataHandler, callbacks: keras.callbacks.CallbackList) -> Logs:
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


def predict(outer: OuterLoop, feed: DataHandler, callbacks: keras.callbacks.CallbackList) -> Any:
    """Returns the model's outputs for the rows of a feed, in order, as NumPy arrays.

    Args:
        outer: What all loops of the trainer work with.
        feed: What to predict from.
        callbacks: Hear of every batch and its outputs; may set `stop_predicting`.
    """
    compute = outer.functions.predict(feed)
    outputs: list[Any] = []

    def some_batches(iterator: Iterator[Any], wanted: int) -> tuple[LoopResult, Logs]:
        made, pieces = compute(iterator, wanted)
        outputs.extend(pieces)
        return made, {"outputs": _end_to_end(pieces)} if made.num_steps else {}

    callbacks.on_predict_begin()
    outer.model.stop_predicting = False
    observers = outer.observers("predict", callbacks, "a prediction")
    per_call = outer.per_call("predict", callbacks, feed)
    epoch.run(some_batches, feed, per_call, outer.strategy, observers)
    callbacks.on_predict_end()
    return keras_data.as_arrays(_end_to_end(outputs))


def _end_to_end(outputs: list[Any]) -> Any:
    """ParameterGather the outputs of several replicas and batches along the rows."""

    def join(*tensors: Any) -> Any:
        filled = [tensor for tensor in tensors if tensor.shape[0] != 0] or [tensors[0]]
        return keras_data.concatenated(filled)

    return keras.tree.map_structure(join, *outputs)
