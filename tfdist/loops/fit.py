"""The three loops of Keras: training, evaluation, and prediction."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np

from tfdist.console import tables
from tfdist.loops import epoch
from tfdist.loops.callbacks import may_change_model
from tfdist.loops.data_handler import DataHandler, EpochDataHandlers
from tfdist.loops.epoch import Call, Epoch, Observer
from tfdist.loops.functions import Loop, Steps
from tfdist.loops.observers import (
    BatchCounts,
    CopySync,
    KerasCallbacks,
    NonFiniteLoss,
    OnNan,
    RunContext,
    Throughput,
    WatchdogMark,
)
from tfdist.loops.outputs import concatenated
from tfdist.loops.rank_checks import CheckRanks, RankChecks, ReplicaChecks, check_modes
from tfdist.loops.self_check import SelfCheck
from tfdist.loops.steps_per_call import StepsPerCall, StepsPerCallCache, wants_every_batch
from tfdist.loops.training_state import Progress
from tfdist.strategies.base import Strategy
from tfdist.strategies.inner_loop import Logs, LoopResult
from tfdist.upstream import keras_optimizers, keras_training
from tfdist.upstream.keras_variables import values_of


class CheckpointHooks(Observer):
    """The points at which a training run can save or restore. This base class does nothing.

    Attributes:
        number: How many fits of the trainer have had checkpoints, with this one.
        progress: Progress of the run.
    """

    def __init__(self, number: int = 0) -> None:
        self.number, self.progress = number, Progress()

    def begin(self, epochs: int) -> bool:
        """Finds a checkpoint to resume from, before any callback is called.

        Returns:
            Whether there is one. If so, `progress` is set from it.

        Raises:
            ConfigurationError: The checkpoint cannot be used, or there must not be one.
        """
        del epochs
        return False

    def after_train_begin(self) -> None:
        """Restores state that callbacks changed or reset in `on_train_begin`."""

    def after_epoch_begin(self) -> tuple[int, Logs]:
        """Returns the number of completed steps of this epoch, and the logs after them."""
        return 0, {}

    def evaluating(self) -> AbstractContextManager[None]:
        """Returns a context for an evaluation, during which nothing is saved."""
        return nullcontext()

    def advance(self, call: Call) -> None:
        """Records the progress after a call; does nothing if it is recorded already."""
        progress = self.progress
        progress.total += call.last_step + 1 - progress.step
        progress.step, progress.logs = call.last_step + 1, dict(call.logs)

    def end_validation(self, logs: Logs) -> None:
        """Called after an evaluation within an epoch, with its logs and those of the epoch."""

    def end_epoch(self, logs: Logs) -> None:
        """Called at the end of an epoch, after all callbacks, with `progress` updated."""

    def save_aside(self, name: str, call: Call) -> str:
        """Saves the state after a call to a separate folder, and returns its path.

        Runs resume from it only if the user requests it. All workers call this together.
        """
        del name, call
        return ""

    def skip_used_data(self) -> None:
        """If the run was already complete, moves shuffled data behind its epochs.

        Call it before the next fit uses the data; it may read data.
        """

    def after_fit(self) -> CheckpointHooks:
        """Returns what the next fit needs of this one, which keeps no data alive without need."""
        return CheckpointHooks(self.number)

    def close(self) -> None:
        """Waits until pending writes are done."""


class StepIntervals(Observer):
    """Ends calls at steps at which something is due, and evaluates at some of them.

    The metrics of the epoch continue after an evaluation.

    Args:
        run: What the observers share.
        checkpoints: Have the progress of the run, and save the best value.
        log_every: Calls end at multiples of this number of steps, so that callbacks see them.
        validate_every: Number of steps after which to evaluate.
        validate: Evaluates, and returns loss and metrics.
    """

    def __init__(
        self,
        run: RunContext,
        checkpoints: CheckpointHooks,
        log_every: int | None,
        validate_every: int | None,
        validate: Callable[[], Logs],
    ) -> None:
        self._functions, self._checkpoints, self._validate = run.functions, checkpoints, validate
        self._intervals = [every for every in (log_every, validate_every) if every]
        self._validate_every = validate_every

    def begin_epoch(self, epoch: Epoch) -> None:
        progress = self._checkpoints.progress
        if progress.step and progress.validated != progress.total:
            self._validate_if_due(progress.logs)  # the run was stopped within this evaluation

    def max_steps(self) -> int | None:
        total = self._checkpoints.progress.total
        return min((every - total % every for every in self._intervals), default=None)

    def end_call(self, call: Call) -> None:
        self._checkpoints.advance(call)
        self._validate_if_due(call.logs)

    def _validate_if_due(self, logs: Logs) -> None:
        progress = self._checkpoints.progress
        if not self._validate_every or progress.total % self._validate_every:
            return
        metrics = [v for one in self._functions.variables()["metrics"] for v in values_of(one)]
        with self._checkpoints.evaluating():
            before = [(variable, variable.read_value()) for variable in metrics]
            values = self._validate()
        for variable, value in before:
            variable.assign(value)
        self._functions.sync_copies()  # callbacks may have changed the model, as SwapEMAWeights
        progress.validated = progress.total
        validated = {f"val_{name}": value for name, value in values.items()}
        self._checkpoints.end_validation({**logs, **validated})


class SkippedSteps(Observer):
    """Reads the batches of some steps without training on them.

    They count as steps without rows. The optimizer does not see them.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], checkpoints: CheckpointHooks) -> None:
        self._spans, self._checkpoints = spans, checkpoints

    def max_steps(self) -> int | None:
        total = self._checkpoints.progress.total
        ends = [end for first, last in self._spans for end in (first - 1, last)]
        return min((end - total for end in ends if end > total), default=None)

    def end_call(self, call: Call) -> None:
        self._checkpoints.advance(call)

    def around(self, steps: Steps) -> Steps:
        """Returns steps that leave these out."""

        def run(iterator: Iterator[Any], num_steps: int) -> tuple[LoopResult, Logs]:
            progress = self._checkpoints.progress
            if not any(first <= progress.total + 1 <= last for first, last in self._spans):
                return steps(iterator, num_steps)
            num_read = sum(1 for _ in itertools.islice(iterator, num_steps))
            return LoopResult(num_read, 0, 0.0, num_read=num_read), progress.logs

        return Steps(run, steps.needs_full_batch)


class Loops:
    """The loops of one trainer: training, evaluation and prediction.

    Args:
        run: What the loops and their observers share.
        self_check: Verifies each loop at its first use.
        steps_per_call: As in `Trainer`, and the following.
        on_nan: What to do if the loss becomes NaN or infinite.
        check_ranks: When to compare the variables of workers, and of the replicas of a process.
        options: The options of the trainer, which must be the same on all workers.
        log_every: Number of steps after which calls end, so that callbacks see these steps.
        validate_every: Number of steps after which to evaluate within an epoch.

    Attributes:
        throughput: Throughput of the current epoch.
        rank_checks: Compares the workers; None where there is nothing to compare.
    """

    def __init__(
        self,
        run: RunContext,
        self_check: SelfCheck,
        steps_per_call: int | str,
        on_nan: OnNan,
        check_ranks: CheckRanks,
        options: Mapping[str, Any],
        log_every: int | None = None,
        validate_every: int | None = None,
    ) -> None:
        self._log_every, self._validate_every = log_every, validate_every
        self._run, self._self_check = run, self_check
        self._steps_per_call, self._check_ranks = steps_per_call, check_ranks
        self._cache = StepsPerCallCache()
        self.throughput = Throughput()
        self._before: list[Observer] = [self.throughput]
        self._after: list[Observer] = [NonFiniteLoss(run, on_nan)]
        self.rank_checks: RankChecks | None = None
        self._batch_counts = BatchCounts(run)
        compares, strategy = check_ranks != "off", run.strategy
        if compares and strategy.num_local_replicas > 1:
            self._before.append(ReplicaChecks(run, check_ranks))
        if compares and strategy.group.size > 1:
            self.rank_checks = RankChecks(run, check_ranks, options)
            self._after.insert(0, self.rank_checks)

    def train(
        self,
        handlers: EpochDataHandlers,
        validate: Callable[[keras.callbacks.CallbackList], Logs] | None,
        callbacks: keras.callbacks.CallbackList,
        epochs: tuple[int, int],
        validation_freq: int | Sequence[int],
        checkpoints: CheckpointHooks,
        report: Callable[[bool], None] | None = None,
        skipped: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Trains from one epoch up to another.

        Args:
            handlers: The training data.
            validate: Evaluates, and returns loss and metrics; None for no evaluation.
            callbacks: The callbacks, called as in `keras.Model.fit`.
            epochs: The first epoch, which a callback may replace, and the one to stop before.
            validation_freq: The epochs with an evaluation, as in `keras.Model.fit`.
            checkpoints: Saves checkpoints, and resumes from them.
            report: Called after the step was traced, with whether it needs full batches.
            skipped: Steps to leave out, as in `SkippedSteps`.
        """
        run, checks = self._run, self.rank_checks
        model, strategy, functions = run.model, run.strategy, run.functions

        # ---- errors come first: workers that differ, and a model that cannot be trained ----
        if strategy.group.size > 1:
            check_modes(strategy, self._check_ranks)
        if checks:
            is_validated = validate is not None
            checks.compare_configurations(
                {"epochs": epochs, "validation": is_validated}, callbacks.callbacks
            )
        data = handlers.of_epoch(epochs[0])
        per_call = self._per_call("train", callbacks, data)
        functions.begin("train")
        steps = functions.train(data, per_call.one_by_one)
        if report:
            report(steps.needs_full_batch)

        # ---- resume, or begin ----
        model.stop_training = False
        is_resumed = checkpoints.begin(epochs[1])
        progress = checkpoints.progress
        callbacks.on_train_begin()
        checkpoints.after_train_begin()
        if checks:
            checks.begin_training()
        if not is_resumed:
            progress.epoch = keras_training.initial_epoch(model, epochs[0])

        by_steps: list[Observer] = []
        every = self._validate_every if validate else None
        if self._log_every or every:

            def evaluate() -> Logs:
                return validate(callbacks) if validate else {}

            by_steps.append(StepIntervals(run, checkpoints, self._log_every, every, evaluate))
        skips = SkippedSteps(skipped, checkpoints) if skipped else None
        if skips:
            by_steps.append(skips)

        logs: Logs = progress.logs
        while progress.epoch < epochs[1] and not progress.stopped:
            # ---- an epoch begins ----
            number, name = progress.epoch, f"epoch {progress.epoch + 1}"
            before, data = data, handlers.of_epoch(number)
            if data is not before:
                callbacks.set_params({**callbacks.params, "steps": data.num_batches})
            model.reset_metrics()
            callbacks.on_epoch_begin(number)
            begin = checkpoints.after_epoch_begin()
            steps = functions.train(data, per_call.one_by_one)
            if not is_resumed:
                line = self._self_check.at_first_use("train", data, steps)
                if line and report and strategy.group.is_chief:
                    tables.text(line)
            if skips:
                steps = skips.around(steps)

            # ---- its steps ----
            after = [*self._after, *by_steps, checkpoints]
            if data.own_rows and strategy.group.size > 1:
                after.insert(0, self._batch_counts)
            observers = self._observers("train", callbacks, self._before, after)
            this = epoch.Epoch(name, data, number + 1 == epochs[1], checkpoints.save_aside)
            logs = epoch.run(steps, this, per_call, strategy, observers, begin)
            logs = functions.epoch_logs(logs, "train")

            # ---- evaluation, callbacks, checkpoint ----
            if validate is not None and keras_training.is_validated(model, number, validation_freq):
                with checkpoints.evaluating():
                    logs |= {f"val_{name}": value for name, value in validate(callbacks).items()}
            callbacks.on_epoch_end(number, logs)
            if strategy.group.size > 1:
                run.watchdog.passed(f"the end of {name}")
                _synchronize_decisions(model, strategy)
            if checks:
                checks.compare_variables()
            progress.epoch, progress.step = number + 1, 0
            progress.stopped = model.stop_training
            checkpoints.end_epoch(logs)

        # ---- the averages of the weights (`use_ema`) ----
        if model.optimizer is not None and model.optimizer.built:
            with keras_optimizers.optimizers_of_one_device():
                model.optimizer.finalize_variable_values(model.trainable_variables)
            strategy.variables.after_update(model.variables)
        callbacks.on_train_end(logs)

    def evaluate(self, data: DataHandler, callbacks: keras.callbacks.CallbackList) -> Logs:
        """Returns loss and metrics over data, from its start.

        Args:
            data: The data.
            callbacks: The callbacks, called as in `keras.Model.evaluate`. They may set
                `stop_evaluating`.
        """
        model, functions = self._run.model, self._run.functions
        per_call = self._per_call("test", callbacks, data)
        functions.begin("test")
        steps = functions.evaluate(data, per_call.one_by_one)
        self._self_check.at_first_use("test", data, steps)
        model.stop_evaluating = False
        callbacks.on_test_begin()
        model.reset_metrics()
        data.restart()
        this = epoch.Epoch("an evaluation", data)
        observers = self._observers("test", callbacks)
        logs = epoch.run(steps, this, per_call, self._run.strategy, observers)
        logs = functions.epoch_logs(logs, "test")
        callbacks.on_test_end(logs)
        return logs

    def predict(self, data: DataHandler, callbacks: keras.callbacks.CallbackList) -> Any:
        """Returns the model's outputs for the rows of data, in order, as NumPy arrays.

        Args:
            data: The data.
            callbacks: The callbacks, called with the outputs of each batch. They may set
                `stop_predicting`.
        """
        compute = self._run.functions.predict(data)
        self._self_check.at_first_use("predict", data, compute)
        outputs: list[Any] = []

        def some_batches(iterator: Iterator[Any], num_requested: int) -> tuple[LoopResult, Logs]:
            result, pieces = compute(iterator, num_requested)
            outputs.extend(pieces)
            return result, {"outputs": concatenated(pieces)} if result.num_steps else {}

        callbacks.on_predict_begin()
        self._run.model.stop_predicting = False
        per_call = self._per_call("predict", callbacks, data)
        steps = Steps(some_batches, compute.needs_full_batch)
        observers = self._observers("predict", callbacks)
        this = epoch.Epoch("a prediction", data)
        epoch.run(steps, this, per_call, self._run.strategy, observers)
        callbacks.on_predict_end()
        return keras_training.as_arrays(concatenated(outputs))

    def _per_call(
        self, loop: Loop, callbacks: keras.callbacks.CallbackList, data: DataHandler
    ) -> StepsPerCall:
        """Returns what chooses the number of steps per call. All workers must call it."""
        every_batch = any(wants_every_batch(c, loop) for c in callbacks.callbacks)
        all_workers = self._run.strategy.group.gather([self._cache.known(loop, data), every_batch])
        return StepsPerCall(
            self._steps_per_call,
            self._run.model,
            every_batch=bool(all_workers[:, 1].any()),
            # Rank 0 decides: the data may be the same object as before only on some workers.
            known=int(all_workers[0, 0]),
            note=functools.partial(self._cache.note, loop, data),
        )

    def _observers(
        self,
        loop: Loop,
        callbacks: keras.callbacks.CallbackList,
        before: Sequence[Observer] = (),
        after: Sequence[Observer] = (),
    ) -> list[Observer]:
        """Returns observers in the order in which they are notified: `before` the callbacks, ..."""
        run = self._run
        changes_model = any(
            wants_every_batch(c, loop) and may_change_model(c) for c in callbacks.callbacks
        )
        sync = CopySync(run, changes_model)
        callback = KerasCallbacks(run, loop, callbacks, sync.watching)
        observers: list[Observer] = [*before, callback, *after, sync]
        if run.strategy.group.size == 1:
            return observers
        return [WatchdogMark(run), *observers, WatchdogMark(run, " and its callbacks")]


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
