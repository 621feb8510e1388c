"""The three loops of Keras: training, evaluation, and prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np

from tfdist.console import tables
from tfdist.loops import epoch
from tfdist.loops.data_handler import DataHandler, EpochDataHandlers
from tfdist.loops.epoch import Call, Observer, OuterLoop, Throughput
from tfdist.loops.non_finite import NonFiniteLoss, OnNan
from tfdist.loops.rank_checks import RankChecks
from tfdist.loops.replica_checks import ReplicaChecks
from tfdist.loops.training_state import Progress
from tfdist.loops.uneven_data import BatchCounts
from tfdist.strategies.base import Strategy
from tfdist.strategies.inner_loop import Logs, LoopResult
from tfdist.upstream import keras_optimizers, keras_training


class CheckpointHooks(Observer):
    """The points at which a training run can save or restore. This base class does nothing.

    Attributes:
        progress: Progress of the run.
        before_save: Called on all workers together before a checkpoint is saved at a step.
        may_save: Returns whether a checkpoint may be saved now, at a time that rank 0 chose.
        skip_used_data: If the run was already complete, moves shuffled data behind its epochs. Call
            it before the data is used again; it may read data.
    """

    def __init__(self) -> None:
        self.progress = Progress()
        self.before_save: Callable[[], None] = lambda: None
        self.may_save: Callable[[], bool] = lambda: True
        self.skip_used_data: Callable[[], None] = lambda: None

    def begin(self, callbacks: Sequence[keras.callbacks.Callback], epochs: int) -> bool:
        """Finds a checkpoint to resume from, before any callback is called.

        Args:
            callbacks: The callbacks of this worker.
            epochs: Total number of epochs.

        Returns:
            Whether there is one. If so, `progress` is set from it.

        Raises:
            ConfigurationError: The checkpoint cannot be used, or there must not be one.
        """
        del callbacks, epochs
        return False

    def after_train_begin(self) -> None:
        """Restores state that callbacks changed or reset in `on_train_begin`."""

    def after_epoch_begin(self) -> tuple[int, Logs]:
        """Returns the number of completed steps of this epoch, and the logs after them."""
        return 0, {}

    def evaluating(self) -> AbstractContextManager[None]:
        """Returns a context for an evaluation, during which nothing is saved."""
        return nullcontext()

    def end_epoch(self, logs: Logs) -> None:
        """Called at the end of an epoch, after all callbacks, with `progress` updated."""

    def save_aside(self, name: str, call: Call) -> str:
        """Saves the state after a call to a separate folder, and returns its path.

        Runs resume from it only if the user requests it. All workers call this together.
        """
        del name, call
        return ""

    def close(self) -> None:
        """Waits until pending writes are done."""


class Training:
    """The training loop of one trainer: epochs, with evaluations according to `validation_freq`.

    Args:
        outer: The objects that all loops of the trainer share.
        on_nan: What to do if the loss becomes NaN or infinite.
        rank_checks: Compares the workers.
        replica_checks: Compares the replicas of this process.

    Attributes:
        throughput: Throughput of the current epoch.
    """

    def __init__(
        self,
        outer: OuterLoop,
        on_nan: OnNan,
        rank_checks: RankChecks,
        replica_checks: ReplicaChecks,
    ) -> None:
        self._outer, self._rank_checks, self._replica_checks = outer, rank_checks, replica_checks
        self.throughput = Throughput()
        self._non_finite_loss = NonFiniteLoss(outer.model, on_nan)
        self._batch_counts = BatchCounts(outer.strategy)

    def run(
        self,
        handlers: EpochDataHandlers,
        validate: Callable[[keras.callbacks.CallbackList], Logs] | None,
        callbacks: keras.callbacks.CallbackList,
        epochs: tuple[int, int],
        validation_freq: int | Sequence[int],
        checkpoints: CheckpointHooks,
        report: Callable[[DataHandler], None] | None = None,
    ) -> None:
        """Trains from one epoch up to another.

        Args:
            handlers: The training data.
            validate: Evaluates, and returns loss and metrics; None for no evaluation.
            callbacks: The callbacks, called as in `keras.Model.fit`.
            epochs: The first epoch, which a callback may replace, and the one to stop before.
            validation_freq: The epochs with an evaluation, as in `keras.Model.fit`.
            checkpoints: Saves checkpoints, and resumes from them.
            report: Called with the training data after the step was traced.
        """
        outer, model, rank_checks = self._outer, self._outer.model, self._rank_checks
        rank_checks.compare_configurations(
            {"epochs": epochs, "validation": validate is not None}, callbacks.callbacks
        )
        data = handlers.of_epoch(epochs[0])
        per_call = outer.per_call("train", callbacks, data)
        outer.functions.begin("train")
        # Raises an error now if the model cannot be trained.
        outer.functions.train(data, per_call.one_by_one)
        if report:
            report(data)
        model.stop_training = False
        checkpoints.before_save = rank_checks.compare_variables
        checkpoints.may_save = rank_checks.have_compared
        is_resumed = checkpoints.begin(callbacks.callbacks, epochs[1])
        progress = checkpoints.progress
        callbacks.on_train_begin()
        checkpoints.after_train_begin()
        rank_checks.begin_training()
        if not is_resumed:
            progress.epoch = keras_training.initial_epoch(model, epochs[0])
        logs: Logs = progress.logs
        while progress.epoch < epochs[1] and not progress.stopped:
            number, name = progress.epoch, f"epoch {progress.epoch + 1}"
            before, data = data, handlers.of_epoch(number)
            if data is not before:
                callbacks.set_params({**callbacks.params, "steps": data.num_batches})
            model.reset_metrics()
            callbacks.on_epoch_begin(number)
            begin = checkpoints.after_epoch_begin()
            self._non_finite_loss.place = rank_checks.place = self._replica_checks.place = name
            self._replica_checks.is_last = number + 1 == epochs[1]
            self._non_finite_loss.save_aside = checkpoints.save_aside
            observers = outer.observers(
                "train", callbacks, name, before=[self.throughput, self._replica_checks],
                after=[self._batch_counts, rank_checks, self._non_finite_loss, checkpoints],
            )  # fmt: skip
            steps = outer.functions.train(data, per_call.one_by_one)
            if not is_resumed:
                line = outer.self_check.at_first_use("train", data, steps)
                if line and report and outer.strategy.group.is_chief:
                    tables.text(line)
            logs = epoch.run(steps, data, per_call, outer.strategy, observers, begin)
            logs = outer.functions.epoch_logs(logs, "train")
            self._batch_counts.report(name)
            if validate is not None and keras_training.is_validated(model, number, validation_freq):
                with checkpoints.evaluating():
                    logs |= {f"val_{name}": value for name, value in validate(callbacks).items()}
            callbacks.on_epoch_end(number, logs)
            outer.watchdog.passed(f"the end of {name}")
            _synchronize_decisions(model, outer.strategy)
            rank_checks.compare_variables()
            progress.epoch, progress.stopped = number + 1, model.stop_training
            checkpoints.end_epoch(logs)
        self._finalize_weights()
        callbacks.on_train_end(logs)

    def _finalize_weights(self) -> None:
        """Sets the weights to their averages if the optimizer averages them (`use_ema`)."""
        model = self._outer.model
        if model.optimizer is None or not model.optimizer.built:
            return
        with keras_optimizers.optimizers_of_one_device():
            model.optimizer.finalize_variable_values(model.trainable_variables)
        self._outer.strategy.variables.after_update(model.variables)


def evaluate(outer: OuterLoop, data: DataHandler, callbacks: keras.callbacks.CallbackList) -> Logs:
    """Returns loss and metrics over data, from its start.

    Args:
        outer: The objects that all loops of the trainer share.
        data: The data.
        callbacks: The callbacks, called as in `keras.Model.evaluate`. They may set
            `stop_evaluating`.
    """
    model = outer.model
    per_call = outer.per_call("test", callbacks, data)
    outer.functions.begin("test")
    steps = outer.functions.evaluate(data, per_call.one_by_one)
    outer.self_check.at_first_use("test", data, steps)
    model.stop_evaluating = False
    callbacks.on_test_begin()
    model.reset_metrics()
    data.restart()
    observers = outer.observers("test", callbacks, "an evaluation")
    logs = epoch.run(steps, data, per_call, outer.strategy, observers)
    logs = outer.functions.epoch_logs(logs, "test")
    callbacks.on_test_end(logs)
    return logs


def predict(outer: OuterLoop, data: DataHandler, callbacks: keras.callbacks.CallbackList) -> Any:
    """Returns the model's outputs for the rows of data, in order, as NumPy arrays.

    Args:
        outer: The objects that all loops of the trainer share.
        data: The data.
        callbacks: The callbacks, called with the outputs of each batch. They may set
            `stop_predicting`.
    """
    compute = outer.functions.predict(data)
    outer.self_check.at_first_use("predict", data, compute)
    outputs: list[Any] = []

    def some_batches(iterator: Iterator[Any], num_requested: int) -> tuple[LoopResult, Logs]:
        result, pieces = compute(iterator, num_requested)
        outputs.extend(pieces)
        return result, {"outputs": _concatenated(pieces)} if result.num_steps else {}

    callbacks.on_predict_begin()
    outer.model.stop_predicting = False
    observers = outer.observers("predict", callbacks, "a prediction")
    per_call = outer.per_call("predict", callbacks, data)
    epoch.run(some_batches, data, per_call, outer.strategy, observers)
    callbacks.on_predict_end()
    return keras_training.as_arrays(_concatenated(outputs))


def _synchronize_decisions(model: keras.Model, strategy: Strategy) -> None:
    """Makes the decisions of callbacks the same on all workers.

    If one worker stops, all stop. Learning rates are those of rank 0. Each of n workers receives
    O(n) numbers.
    """
    optimizers = keras_optimizers.optimizers_of(model)
    rates = [keras_optimizers.learning_rate_variable(optimizer) for optimizer in optimizers]
    values = [0.0 if rate is None else float(np.asarray(rate.value)) for rate in rates]
    all_workers = strategy.group.gather([model.stop_training, *values])
    model.stop_training = bool(all_workers[:, 0].any())
    for i, (optimizer, rate) in enumerate(zip(optimizers, rates, strict=True)):
        if rate is not None and all_workers[0, i + 1] != values[i]:
            optimizer.learning_rate = all_workers[0, i + 1]


def _concatenated(outputs: list[Any]) -> Any:
    """Concatenates the outputs of several replicas and batches along the rows."""

    def join(*tensors: Any) -> Any:
        nonempty = [tensor for tensor in tensors if tensor.shape[0] != 0] or [tensors[0]]
        return keras_training.concatenated(nonempty)

    return keras.tree.map_structure(join, *outputs)
