"""Trains any Keras model over several replicas to the numbers of one device: the front door."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, TypeVar, cast

import keras

from tfdist import strategies
from tfdist.callbacks.progress import ProgressBar
from tfdist.checkpoint.settings import Checkpoints
from tfdist.errors import ConfigurationError
from tfdist.loops import interrupts, keras_loops
from tfdist.loops.callbacks import create_callback_list
from tfdist.loops.checkpointing import CheckpointHooks, Checkpointing
from tfdist.loops.compiled_functions import CompiledFunctions, StepOptions
from tfdist.loops.data_handler import BatchSizes, DataHandler, EpochDataHandlers, limited_epochs
from tfdist.loops.epoch import OuterLoop
from tfdist.loops.exactness import ExactnessReport
from tfdist.loops.keras_loops import Training
from tfdist.loops.model_overrides import overrides, through_the_model
from tfdist.loops.training_state import TrainingState
from tfdist.model_setup import build, create
from tfdist.precision import LossScale
from tfdist.step.remat import prepare as prepare_to_recompute
from tfdist.strategies.base import Strategy
from tfdist.strategies.inner_loop import Logs
from tfdist.upstream import keras_data
from tfdist.watchdog.watchdog import Watchdog

Method = TypeVar("Method", bound=Callable[..., Any])


def _together(method: Method) -> Method:
    """A method that all workers call together: none waits for ever, and all stop together.

    What breaks because one of them is lost is said to be that.
    """

    @functools.wraps(method)
    def call(self: Trainer, *args: Any, **options: Any) -> Any:
        with (
            self.strategy.translate_errors(),
            self._watchdog.watching(method.__name__),
            interrupts.held_back(lambda told: int(self.strategy.gather([told]).max())),
        ):
            return method(self, *args, **options)

    return cast(Method, call)


class Trainer:
    """`fit`, `evaluate` and `predict` of a Keras model, over the replicas of a strategy.

    Args:
        build_model: Returns a compiled `keras.Model`; called in the strategy's scope. Or a
            compiled model, which is rebuilt there with its weights, and itself stays as it was.
        strategy: A name out of `strategies.STRATEGIES`, or a `Strategy`.
        devices: Of this process; None: all; a number (logical CPU devices on a host without
            GPUs); or a list of names.
        accumulate: Rounds in which a global batch is computed, to need less memory.
        sync_batch_norm: Whether BatchNorm takes its moments from the global batch; otherwise
            from each replica's share, as in Keras.
        steps_per_call: Steps in one call of the inner loop; `"auto"`: see `StepsPerCall`.
        precision: A dtype policy to build the model with, out of `precision.POLICIES`.
        loss_scale: How the loss is scaled; None: dynamically for the float16 policies.
        recompute: Layers whose activations are not kept for the way back, but computed again:
            `"none"`, `"all"`, or a regular expression that finds names like `"block_1/dense"`;
            besides those that `build_model` makes in a `keras.RematScope`.
        watchdog_seconds: Of several workers: for which nobody may make a step before the run is
            ended; 0: for ever.
        checkpoints: Where `fit` saves itself, and goes on from; a second `fit` does so in the
            folder `fit-2` there, and so on. None: it does not.

    Attributes:
        model: A plain Keras model, on the first device, during a training too: its own `predict`,
            `evaluate`, `fit` and `train_on_batch` compute there, and the trainer goes on from
            whatever was made of it. It saves to `.keras` and loads without tfdist. A class that
            overrides `fit`, `evaluate` or `predict` is heard: what it calls by `super()` is the
            trainer's.
        strategy: The strategy at work.
        stats: Throughput of the running epoch.
        checkpoints: As given; may be set before `fit`.

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
        checkpoints: Checkpoints | None = None,
        recompute: str = "none",
    ) -> None:
        if not isinstance(accumulate, int) or accumulate < 1:
            raise ConfigurationError(f"accumulate={accumulate!r}: expected a number from 1.")
        if accumulate > 1 and sync_batch_norm:
            raise ConfigurationError(
                "sync_batch_norm takes the moments of the global batch, which accumulate="
                f"{accumulate} never holds at once: leave one of the two out."
            )
        prepare_to_recompute(recompute)
        self.strategy = strategy = strategies.create(strategy, devices)
        self.accumulate, self.sync_batch_norm = accumulate, sync_batch_norm
        self.recompute = recompute
        self.checkpoints, self._num_fits = checkpoints, 0
        self._watchdog = Watchdog(strategy, watchdog_seconds)
        self.model = create.create(build_model, strategy, precision, loss_scale)
        strategy.place(self.model)
        options = StepOptions(accumulate, sync_batch_norm, precision, loss_scale, recompute)
        functions = CompiledFunctions(self.model, strategy, options)
        self._outer = OuterLoop(self.model, strategy, functions, self._watchdog, steps_per_call)
        self._training = Training(self._outer)
        is_rebuilt = isinstance(build_model, keras.Model)
        self._exactness = ExactnessReport(
            self.model, strategy, accumulate, sync_batch_norm, is_rebuilt
        )
        self.stats = self._training.throughput

    @_together
    @through_the_model
    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | BatchSizes | None = None,
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

        `batch_size` is the global batch, or several by the epoch from which on they hold, like
        `{0: 32, 5: 64}`, which arrays and data sets are cut into. `x` may also be a function of a
        `tf.distribute.InputContext` that returns this worker's data set. The first call prints
        what is not to the numbers of one device, if anything; `verbose=0` prints nothing.

        Where the loss is scaled (a float16 policy, a `LossScaleOptimizer`), logs and history have
        two keys that Keras's have not: `loss_scale`, and `skipped_steps` that overflowed so far.

        Raises:
            TfdistError: Model, data and options do not go together; the message has the cure.
        """
        build.check_trainable(self.model)
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = keras_data.train_validation_split(
                (x, y, sample_weight), validation_split
            )
        feeds = EpochDataHandlers(
            self.strategy, x, batch_size, training=True,
            y=y, sample_weight=sample_weight, shuffle=shuffle,
            steps_per_epoch=steps_per_epoch, class_weight=class_weight,
        )  # fmt: skip
        validate, tested = None, list[DataHandler]()
        if validation_data is not None:
            validate = self._validation(
                validation_data, validation_batch_size or feeds.batch_size, validation_steps, tested
            )
        epochs = limited_epochs(epochs)
        num_batches = feeds.of_epoch(initial_epoch).num_batches
        callbacks = self._callback_list(callbacks, verbose, epochs, num_batches)
        tell = self._exactness.print_once if verbose else None
        span = (initial_epoch, epochs)
        with closing(self._saving(feeds, tested)) as saving:
            self._training.run(feeds, validate, callbacks, span, validation_freq, saving, tell)
        return self.model.history

    @_together
    @through_the_model
    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Returns loss and metrics; arguments and result as `keras.Model.evaluate`."""
        build.check_trainable(self.model)
        feed = DataHandler(
            self.strategy, x, y=y, sample_weight=sample_weight, batch_size=batch_size,
            steps_per_epoch=steps, shuffle=False,
        )  # fmt: skip
        callbacks = self._callback_list(callbacks, verbose, 1, feed.num_batches, history=False)
        logs = keras_loops.evaluate(self._outer, feed, callbacks)
        return logs if return_dict else keras_data.in_order_of_metrics(self.model, logs)

    @_together
    @through_the_model
    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Returns the model's outputs for exactly the rows given, in order, as NumPy arrays."""
        feed = DataHandler(
            self.strategy, x, batch_size=batch_size, steps_per_epoch=steps, shuffle=False
        )
        callbacks = self._callback_list(callbacks, verbose, 1, feed.num_batches, history=False)
        return keras_loops.predict(self._outer, feed, callbacks)

    def describe(self) -> dict[str, str]:
        """Returns what a start-up table says of this trainer; `fit` then need not say it."""
        return self.strategy.describe() | {
            "accumulation": f"{self.accumulate} rounds" if self.accumulate > 1 else "none",
            "precision": self.model.dtype_policy.name,
            "sync BatchNorm": "yes" if self.sync_batch_norm else "no",
            "computed again": self.recompute,
            "not exact": self._exactness.told(),
        }

    def _saving(self, feeds: EpochDataHandlers, tested: list[DataHandler]) -> CheckpointHooks:
        """Returns what saves the `fit` of some data."""
        if self.checkpoints is None:
            return CheckpointHooks()
        self._num_fits += 1
        functions = self._outer.functions
        state = TrainingState(self.model, self.strategy, functions, feeds, tested)
        settings = self.checkpoints.of_fit(self._num_fits)
        return Checkpointing(settings, self.model, self.strategy, state)

    def _validation(
        self, data: Any, batch_size: int | None, steps: int | None, tested: list[DataHandler]
    ) -> Callable[[keras.callbacks.CallbackList], Logs]:
        """Returns what evaluates within a training, each time from the beginning of its data.

        Args:
            data: As `validation_data` of `fit`.
            batch_size: Global.
            steps: Of an evaluation.
            tested: Takes the feed of it, where there is one.
        """
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        options = {"y": y, "sample_weight": weight, "batch_size": batch_size}
        if overrides(self.model, "evaluate"):
            return lambda callbacks: self.evaluate(
                x, steps=steps, callbacks=callbacks, return_dict=True, **options
            )
        feed = DataHandler(self.strategy, x, steps_per_epoch=steps, shuffle=False, **options)
        tested.append(feed)
        return functools.partial(keras_loops.evaluate, self._outer, feed)

    def _callback_list(
        self,
        callbacks: Any,
        verbose: str | int,
        epochs: int,
        steps: int | None,
        history: bool = True,
    ) -> keras.callbacks.CallbackList:
        """Returns Keras's container of callbacks, with a progress line if wanted."""
        progress = ProgressBar(self.stats) if verbose else None
        return create_callback_list(
            callbacks, progress, self.strategy,
            model=self.model, verbose=verbose, epochs=epochs, steps=steps, add_history=history,
        )  # fmt: skip
