"""Trains any Keras model over several replicas to the numbers of one device: the outer loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import keras
from keras.src.trainers.data_adapters import array_slicing

from tfdist import strategies
from tfdist.callbacks.progress import ProgressBar
from tfdist.errors import ConfigurationError
from tfdist.loops import callback_list, epoch, interrupts, prediction
from tfdist.loops.compiled_functions import Engine
from tfdist.loops.feed import Feed
from tfdist.loops.steps_per_call import Pace, Stats
from tfdist.model_setup import create
from tfdist.precision import LossScale
from tfdist.step.batch_norm import layers_of
from tfdist.strategies.base import Strategy
from tfdist.strategies.inner_loop import Logs, Made
from tfdist.upstream.keras_model import seeds_of
from tfdist.watchdog.watchdog import Watchdog

Method = TypeVar("Method", bound=Callable[..., Any])


def _together(method: Method) -> Method:
    """A method that all workers call together: none waits for ever, and all stop together.

    What breaks because one of them is lost is said to be that.
    """

    @functools.wraps(method)
    def call(self: Trainer, *args: Any, **options: Any) -> Any:
        together = self._watchdog.watching(method.__name__)
        with (
            self.strategy.explaining(),
            together,
            interrupts.held_back(self.strategy.stops_together),
        ):
            return method(self, *args, **options)

    return cast(Method, call)


class Trainer:
    """`fit`, `evaluate` and `predict` of a Keras model, over the replicas of a strategy.

    Args:
        build_model: Returns a compiled `keras.Model`; called in the strategy's scope. Or a
            compiled model, which is rebuilt there with its weights.
        strategy: A name out of `strategies.STRATEGIES`, or a `Strategy`.
        devices: Of this process; None: all; a number (logical CPU devices on a host without
            GPUs); or a list of names.
        accumulate: Rounds in which a global batch is computed, to need less memory.
        sync_batch_norm: Whether BatchNorm takes its moments from the global batch; otherwise
            from each replica's share, as in Keras.
        steps_per_call: Steps in one call of the inner loop; `"auto"`: see `Pace`.
        precision: A dtype policy to build the model with, out of `precision.POLICIES`.
        loss_scale: How the loss is scaled; None: dynamically for the float16 policies.
        watchdog_seconds: Of several workers: for which nobody may make a step before the run is
            ended; 0: for ever.

    Attributes:
        model: A plain Keras model, which saves to `.keras` and loads without tfdist.
        strategy: The strategy at work.
        stats: Throughput of the running epoch.

    Raises:
        TfdistError: An option or a model that cannot be honoured; the message has the cure.
    """

    def __init__(
        self,
        build_model: create.BuildModel,
        strategy: str | Strategy = "mirrored",
        devices: int | str | Sequence[str] | None = None,
        accumulate: int = 1,
        sync_batch_norm: bool = False,
        steps_per_call: int | str = "auto",
        precision: str | None = None,
        loss_scale: LossScale | None = None,
        watchdog_seconds: float = 300.0,
    ) -> None:
        if not isinstance(accumulate, int) or accumulate < 1:
            raise ConfigurationError(f"accumulate={accumulate!r}: expected a number from 1.")
        if accumulate > 1 and sync_batch_norm:
            raise ConfigurationError(
                "sync_batch_norm takes the moments of the global batch, which accumulate="
                f"{accumulate} never holds at once: leave one of the two out."
            )
        self.strategy = strategy = strategies.create(strategy, devices)
        self.accumulate, self.sync_batch_norm = accumulate, sync_batch_norm
        self.stats = Stats()
        self._watchdog = Watchdog(strategy, watchdog_seconds)
        self._steps_per_call = steps_per_call
        self.model = create.create(build_model, strategy, precision, loss_scale)
        self._engine = Engine(
            self.model, strategy, accumulate, sync_batch_norm, precision, loss_scale
        )
        self._started = False

    @_together
    def fit(
        self,
        x: Any = None,
        y: Any = None,
        *,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: dict[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Sequence[int] = 1,
    ) -> keras.callbacks.History:
        """Trains the model; arguments and result as `keras.Model.fit`.

        `batch_size` is the global batch. `x` may also be a function of a
        `tf.distribute.InputContext` that returns this worker's data set.

        Raises:
            TfdistError: Model, data and options do not go together; the message has the cure.
        """
        create.check_trainable(self.model)
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = array_slicing.train_validation_split(
                (x, y, sample_weight), validation_split=validation_split
            )
        feed = Feed(
            self.strategy, x, training=True,
            y=y, sample_weight=sample_weight, batch_size=batch_size, shuffle=shuffle,
            steps_per_epoch=steps_per_epoch, class_weight=class_weight,
        )  # fmt: skip
        validation = None
        if validation_data is not None:
            val_x, val_y, val_weight = keras.utils.unpack_x_y_sample_weight(validation_data)
            validation = Feed(
                self.strategy, val_x, y=val_y, sample_weight=val_weight, shuffle=False,
                batch_size=validation_batch_size or batch_size, steps_per_epoch=validation_steps,
            )  # fmt: skip
        listeners = self._listeners(callbacks, verbose, epochs, feed.num_batches)
        pace = Pace(self._steps_per_call, self.model, listeners.callbacks)
        self._engine.train(feed)
        self.model.stop_training = False
        listeners.on_train_begin()
        logs: dict[str, float] = {}
        for number in range(self.model._initial_epoch or initial_epoch, epochs):
            listeners.on_epoch_begin(number)
            logs = self._train_epoch(number, feed, listeners, pace)
            if validation is not None and self.model._should_eval(number, validation_freq):
                results = self._evaluate(validation, listeners)
                logs |= {f"val_{name}": value for name, value in results.items()}
            listeners.on_epoch_end(number, logs)
            self._watchdog.passed(f"the end of epoch {number + 1}")
            epoch.agree(self.model, self.strategy)
            if self.model.stop_training:
                break
        self._engine.finalize()
        listeners.on_train_end(logs)
        return self.model.history

    @_together
    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        *,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Returns loss and metrics; arguments and result as `keras.Model.evaluate`."""
        create.check_trainable(self.model)
        feed = Feed(
            self.strategy, x, y=y, sample_weight=sample_weight, batch_size=batch_size,
            steps_per_epoch=steps, shuffle=False,
        )  # fmt: skip
        listeners = self._listeners(callbacks, verbose, 1, feed.num_batches, history=False)
        logs = self._evaluate(feed, listeners)
        return logs if return_dict else self.model._flatten_metrics_in_order(logs)

    @_together
    def predict(
        self,
        x: Any,
        *,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Returns the model's outputs for exactly the rows given, in order, as NumPy arrays."""
        feed = Feed(self.strategy, x, batch_size=batch_size, steps_per_epoch=steps, shuffle=False)
        predict = self._engine.predict(feed)
        listeners = self._listeners(callbacks, verbose, 1, feed.num_batches, history=False)

        def passed(step: int) -> None:
            self._watchdog.passed(f"batch {step + 1} of a prediction")

        return prediction.run(predict, feed, self.model, listeners, passed)

    def describe(self) -> dict[str, str]:
        """Returns what a start-up table says of this trainer."""
        inexact = dict(self.strategy.inexact)
        several = self.strategy.num_replicas * self.accumulate > 1
        synchronised = [self.sync_batch_norm or x.synchronized for x in layers_of(self.model)]
        if several and not all(synchronised):
            inexact["BatchNorm"] = "each share has its own moments; sync_batch_norm mends it"
        if several and seeds_of(self.model):
            inexact["random layers"] = "each share draws numbers of its own"
        return self.strategy.describe() | {
            "accumulation": f"{self.accumulate} rounds" if self.accumulate > 1 else "none",
            "precision": self.model.dtype_policy.name,
            "sync BatchNorm": "yes" if self.sync_batch_norm else "no",
            "not exact": "; ".join(f"{name}: {why}" for name, why in inexact.items()) or "nothing",
        }

    def _train_epoch(
        self, number: int, feed: Feed, listeners: keras.callbacks.CallbackList, pace: Pace
    ) -> dict[str, Any]:
        """Makes the steps of one epoch and returns the logs after the last."""

        def end(step: int, made: Made, seconds: float, logs: Logs) -> bool:
            place = f"step {step + 1} of epoch {number + 1}"
            self._watchdog.passed(place)
            self.stats.add(made, seconds)
            listeners.on_train_batch_end(step, logs)
            if not (self._started or self.model.stop_training):
                epoch.check_first_loss(feed, logs)
            self._started = True
            self._watchdog.passed(f"{place} and its callbacks")
            return self.model.stop_training

        self.model.reset_metrics()
        self.stats.begin()
        call = self._engine.train(feed)
        return epoch.run(
            call, feed, pace, self.strategy.gather, listeners.on_train_batch_begin, end
        )

    def _evaluate(self, feed: Feed, listeners: keras.callbacks.CallbackList) -> dict[str, Any]:
        """Computes loss and metrics over a feed, from its beginning."""

        def end(step: int, made: Made, seconds: float, logs: Logs) -> bool:
            place = f"step {step + 1} of an evaluation"
            self._watchdog.passed(place)
            listeners.on_test_batch_end(step, logs)
            self._watchdog.passed(f"{place} and its callbacks")
            return self.model.stop_evaluating

        pace = Pace(self._steps_per_call, self.model, listeners.callbacks, "test")
        call = self._engine.test(feed)
        self.model.stop_evaluating = False
        listeners.on_test_begin()
        self.model.reset_metrics()
        feed.restart()
        logs = epoch.run(call, feed, pace, self.strategy.gather, listeners.on_test_batch_begin, end)
        listeners.on_test_end(logs)
        return logs

    def _listeners(
        self,
        callbacks: Any,
        verbose: str | int,
        epochs: int,
        steps: int | None,
        history: bool = True,
    ) -> keras.callbacks.CallbackList:
        """Returns Keras's container of callbacks, with a progress line if wanted."""
        progress = ProgressBar(self.stats) if verbose else None
        return callback_list.create(
            callbacks, progress,
            model=self.model, verbose=verbose, epochs=epochs, steps=steps, add_history=history,
        )  # fmt: skip
