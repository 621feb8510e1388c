"""`Trainer`: trains a Keras model on several replicas, with the numbers of one device."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from typing import Any, TypeVar, cast, get_args

import keras

from tfdist import strategies
from tfdist.callbacks.progress import ProgressBar
from tfdist.checkpoint.settings import Checkpoints
from tfdist.cluster.remote import connection
from tfdist.cluster.watchdog.watchdog import Watchdog
from tfdist.console import streams, units
from tfdist.errors import ConfigurationError
from tfdist.loops import interrupts, model_methods
from tfdist.loops.callbacks import create_callback_list
from tfdist.loops.checkpointing import Checkpointing
from tfdist.loops.data_handler import (
    BatchSizes,
    DataHandler,
    EpochDataHandlers,
    ValidationData,
    limited_epochs,
)
from tfdist.loops.fit import CheckpointHooks, Loops
from tfdist.loops.functions import CompiledFunctions, Loop
from tfdist.loops.model_methods import ExactnessReport, honor_overrides
from tfdist.loops.observers import OnNan, RunContext
from tfdist.loops.rank_checks import CheckRanks
from tfdist.loops.self_check import SelfCheck, Verify, checked_mode
from tfdist.loops.training_state import TrainingState
from tfdist.memory import DeviceMemory, StepPlanner, zeros
from tfdist.model_setup import build, create
from tfdist.patches import remat as remat_of_layers
from tfdist.precision import LossScale
from tfdist.replica.replica import StepOptions
from tfdist.strategies.base import Strategy
from tfdist.strategies.batches import CheckData
from tfdist.strategies.feed import UnevenData
from tfdist.strategies.inner_loop import Logs
from tfdist.strategies.sharded.plan import bytes_by_device
from tfdist.upstream import features, input_data, keras_training
from tfdist.upstream.keras_model import overrides

Method = TypeVar("Method", bound=Callable[..., Any])


def on_all_workers(method: Method) -> Method:
    """Wraps a method that all workers call together, so that they also stop together.

    Errors caused by a lost worker are reported as such. During the call, `keras.remat` is replaced
    by an exact one, and Keras is patched for the strategy's variables.
    """

    @functools.wraps(method)
    def call(self: Trainer, *args: Any, **options: Any) -> Any:
        several = self.strategy.group.size > 1
        with (
            streams.guarded(),
            self.strategy.translate_errors(),
            self._watchdog.watching(method.__name__) if several else nullcontext(),
            interrupts.deferred(lambda signal: int(self.strategy.group.gather([signal]).max())),
            remat_of_layers.exact_remat(),
            self.strategy.variables.patched_keras(),
        ):
            return method(self, *args, **options)

    return cast(Method, call)


class Trainer:
    """Provides `fit`, `evaluate` and `predict` of a Keras model on the replicas of a strategy.

    Example:
        >>> trainer = tfdist.Trainer(build_model, strategy="mirrored", devices=2)
        >>> history = trainer.fit(x, y, batch_size=64, epochs=2, verbose=0)
        >>> sorted(history.history)
        ['accuracy', 'loss']
        >>> type(trainer.model).__name__
        'Sequential'

    Args:
        build_model: A function that returns a compiled `keras.Model`; called in the strategy's
            scope. Or a compiled model, which is rebuilt in that scope with its weights, and is
            not changed.
        strategy: A name from `strategies.STRATEGIES`, or a `Strategy`. `"auto"`: `mirrored` in one
            process; `multi_worker` or `horovod` over the processes of a launcher.
        devices: The devices of this process. None for all; a number (logical CPU devices on a host
            without GPUs); or a list of names.
        accumulate: Gradient accumulation: number of micro-batches per global batch. More
            micro-batches need less memory.
        sync_batch_norm: Whether BatchNorm uses the moments of the global batch. By default, each
            replica uses those of its per-replica batch, as in Keras.
        steps_per_call: Number of steps per call of the inner loop, or `"auto"`; see
            `StepsPerCall`.
        precision: The dtype policy to build the model with, from `precision.POLICIES`.
        loss_scale: The loss scale. None: dynamic with the float16 policies, otherwise none.
        remat: Activation checkpointing: the layers whose activations are recomputed in the
            backward pass. `"none"`, `"all"`, or a regular expression that finds names like
            `"block_1/dense"`. Layers that `build_model` creates in a `keras.RematScope` are always
            rematerialized.
        recompute: Alias of `remat`.
        offload_activations: Whether the activations of the training step are in host memory between
            the forward and the backward pass, at the cost of two copies of each.
        replica_random: Whether each replica uses different random numbers in dropout, noise and
            augmentation. By default, each replica uses its rows of the random numbers of
            single-device training.
        watchdog_seconds: With several workers, the time without progress, in seconds, after which
            the run is terminated. 0 to wait forever.
        checkpoints: Where `fit` saves checkpoints, and whether it resumes. A second call of `fit`
            uses the subfolder `fit-2`, and so on. None for no checkpoints.
        on_nan: What to do if the loss becomes NaN or infinite: `"warn"` and continue, `"stop"` with
            an error, or `"checkpoint"`: save the state to the subfolder `non-finite` of the
            checkpoints' folder, and stop. Steps that loss scaling skips do not count.
        check_data: With several workers, how they check that they read the same global batches.
            `"full"` compares every element; `"sampled"` labels, weights and a strided sample of
            the inputs; `"off"` nothing.
        check_ranks: With several workers, when they check that they have the same weights and
            optimizer state: `"auto"` at epochs, checkpoints and every N calls of the inner loop,
            which takes at most 1% of the time; `"every-call"` after each call. In both cases, they
            also compare configurations before the first step and hyperparameters after each call.
            `"off"` compares nothing.
        uneven_data: What to do if each worker trains on its own dataset and one has fewer batches.
            `"pad"`: the other workers continue. `"stop"`: the epoch ends. `"refuse"`: an error is
            raised. The chief prints a warning with the number of batches of each worker.
        verify: When the first steps are compared with plain Keras on one device: `"off"`: never;
            `"first"`: at the first use of `fit`, `evaluate` and `predict`; a number: with so many
            steps. None: as `"first"`, if the model, its losses, metrics, optimizers or steps
            contain code that is not Keras's, and the model is small. A difference raises a
            `VerificationError` before anything is trained.
        log_every: Adds `gradient_norm` to the logs: the global norm of the last step's gradients
            before they are clipped. A number N: callbacks are also called after each N-th step,
            where a `StepLog` writes a row. `"auto"`: callbacks log by time. None: by epochs.
        validate_every: Also evaluates `validation_data` after each N-th training step of `fit`.
            `checkpoints.keep_best` then also considers these steps. None: only at epochs, as
            `validation_freq` of `fit` says.

    Attributes:
        model: A plain Keras model on the first device, also during training. Its methods `predict`,
            `evaluate`, `fit` and `train_on_batch` run on this device, and the trainer continues
            from the resulting weights. It saves to `.keras` and loads without tfdist. Overrides of
            `fit`, `evaluate` and `predict` in a model subclass are honored: their `super()` calls
            run the trainer's methods.
        strategy: The strategy.
        stats: Throughput of the current epoch.
        checkpoints: As passed. It may be changed before `fit`.
        skipped_steps: First and last numbers, from 1, of steps that `fit` leaves out: it reads
            their batches without training on them. Empty at first.

    Raises:
        TfdistError: An option or the model is not supported. The message explains the fix.
    """

    def __init__(
        self,
        build_model: create.BuildModel,
        strategy: str | Strategy = "auto",
        devices: int | str | Sequence[str] | None = None,
        accumulate: int = 1,
        sync_batch_norm: bool = False,
        steps_per_call: int | str = "auto",
        precision: str | None = None,
        loss_scale: LossScale | None = None,
        watchdog_seconds: float = 300.0,
        checkpoints: Checkpoints | None = None,
        recompute: str | None = None,
        on_nan: OnNan = "warn",
        remat: str = "none",
        replica_random: bool = False,
        check_data: CheckData = "full",
        check_ranks: CheckRanks = "auto",
        uneven_data: UnevenData = "pad",
        verify: Verify = None,
        log_every: int | str | None = None,
        validate_every: int | None = None,
        offload_activations: bool = False,
    ) -> None:
        if not isinstance(accumulate, int) or accumulate < 1:
            raise ConfigurationError(
                f"accumulate={accumulate!r}: expected an integer of at least 1."
            )
        if accumulate > 1 and sync_batch_norm:
            raise ConfigurationError(
                "sync_batch_norm needs the moments of the global batch, but with accumulate="
                f"{accumulate} it is computed in micro-batches. Use only one of the two."
            )
        if not isinstance(checkpoints, Checkpoints | None):
            raise ConfigurationError(
                f"checkpoints={checkpoints!r}: expected tfdist.Checkpoints({checkpoints!r})."
            )
        _check_choice("check_data", check_data, get_args(CheckData))
        _check_choice("uneven_data", uneven_data, get_args(UnevenData))
        _check_choice("check_ranks", check_ranks, get_args(CheckRanks))
        _check_steps("log_every", log_every, None, "auto")
        _check_steps("validate_every", validate_every, None)
        verify = checked_mode(verify)
        if recompute is not None:
            if remat != "none":
                raise ConfigurationError("Pass remat or its alias recompute, not both.")
            remat = recompute
        remat_of_layers.check(remat)
        self.strategy = strategy = strategies.create(strategy, devices)
        self._data_checks: dict[str, Any] = {"check_data": check_data, "uneven_data": uneven_data}
        self.accumulate, self.sync_batch_norm = accumulate, sync_batch_norm
        self.remat = remat
        self.checkpoints, self.last_fit = checkpoints, CheckpointHooks()
        self.skipped_steps: list[tuple[int, int]] = []
        self._watchdog = Watchdog(strategy.group, watchdog_seconds)
        with strategy.translate_errors():
            with remat_of_layers.exact_remat():
                self.model = create.create(build_model, strategy, precision, loss_scale, accumulate)
            strategy.variables.place(self.model)
        options = StepOptions(
            accumulate, sync_batch_norm, precision, loss_scale, remat, replica_random,
            gradient_norm=log_every is not None, offload_activations=offload_activations,
        )  # fmt: skip
        self._options = options
        functions = CompiledFunctions(self.model, strategy, options)
        is_rebuilt = isinstance(build_model, keras.Model)
        self._exactness = ExactnessReport(self.model, strategy, options, is_rebuilt)
        self._run = RunContext(self.model, strategy, functions, self._watchdog)
        self._self_check = SelfCheck(self._run, accumulate, self._exactness, verify)
        compared = {
            **vars(options), "steps_per_call": steps_per_call, "on_nan": on_nan,
            "check_data": check_data, "uneven_data": uneven_data,
            "log_every": log_every, "validate_every": validate_every,
        }  # fmt: skip
        self._loops = Loops(
            self._run,
            self._self_check,
            steps_per_call,
            on_nan,
            check_ranks,
            compared,
            log_every if isinstance(log_every, int) else None,
            validate_every,
        )
        self._on_nan = on_nan
        features.tested()
        model_methods.write_on_chief_only(self.model, strategy)
        self.stats = self._loops.throughput

    @on_all_workers
    @honor_overrides
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
        """Trains the model. Arguments and result are as in `keras.Model.fit`.

        `batch_size` is the size of the global batch. For a batch size that changes during training,
        pass a mapping from the first epoch of each size, such as `{0: 32, 5: 64}`. `x` can also be
        a function of a `tf.distribute.InputContext` that returns this worker's dataset.
        The first call prints a warning for anything that will not match single-device results;
        `verbose=0` prints nothing.

        If the loss is scaled (a float16 policy, a `LossScaleOptimizer`), logs and history have two
        more keys than in Keras: `loss_scale`, and `skipped_steps`, the number of steps that
        overflowed so far.

        Example:
            >>> trainer = tfdist.Trainer(build_model, devices=2)
            >>> history = trainer.fit(
            ...     x, y, batch_size=64, epochs=2, validation_split=0.1, verbose=0
            ... )
            >>> len(history.history["val_loss"])
            2

        Raises:
            TfdistError: Model, data or options are incompatible. The message explains the fix.
        """
        build.check_trainable(self.model)
        self.last_fit.skip_used_data()
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = input_data.train_validation_split(
                (x, y, sample_weight), validation_split
            )
        handlers = EpochDataHandlers(
            self.strategy, x, batch_size, training=True,
            y=y, sample_weight=sample_weight, shuffle=shuffle,
            steps_per_epoch=steps_per_epoch, class_weight=class_weight, **self._data_checks,
        )  # fmt: skip
        validate, validation = None, None
        if validation_data is not None:
            size = validation_batch_size or handlers.batch_size
            validate, validation = self._validation(validation_data, size, validation_steps)
        epochs = limited_epochs(epochs)
        num_batches = handlers.of_epoch(initial_epoch).num_batches
        callbacks = self._callback_list(callbacks, verbose, epochs, num_batches)
        report = self._exactness.print_once if verbose else None
        span = (initial_epoch, epochs)
        with closing(self._checkpointing(callbacks.callbacks, handlers, validation)) as checkpoints:
            self._loops.train(
                handlers, validate, callbacks, span, validation_freq, checkpoints, report,
                self.skipped_steps,
            )  # fmt: skip
        self.last_fit = checkpoints.after_fit()
        return self.model.history

    @on_all_workers
    @honor_overrides
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
        """Returns loss and metrics. Arguments and result are as in `keras.Model.evaluate`.

        Example:
            >>> trainer = tfdist.Trainer(build_model, devices=2)
            >>> loss, accuracy = trainer.evaluate(x, y, batch_size=64, verbose=0)
            >>> bool(0 <= accuracy <= 1)
            True
        """
        build.check_trainable(self.model)
        handler = DataHandler(
            self.strategy, x, y=y, sample_weight=sample_weight, batch_size=batch_size,
            steps_per_epoch=steps, shuffle=False, **self._data_checks,
        )  # fmt: skip
        callbacks = self._callback_list(callbacks, verbose, 1, handler.num_batches, history=False)
        logs = self._loops.evaluate(handler, callbacks)
        if return_dict:
            return dict(sorted(logs.items()))  # in the order of Keras
        return keras_training.in_order_of_metrics(self.model, logs)

    @on_all_workers
    @honor_overrides
    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Returns the outputs for all rows, in order. Arguments are as in `keras.Model.predict`.

        Example:
            >>> trainer = tfdist.Trainer(build_model, devices=2)
            >>> trainer.predict(x[:100], batch_size=64, verbose=0).shape
            (100, 10)
        """
        handler = DataHandler(
            self.strategy, x, batch_size=batch_size, steps_per_epoch=steps, shuffle=False,
            **self._data_checks,
        )  # fmt: skip
        callbacks = self._callback_list(callbacks, verbose, 1, handler.num_batches, history=False)
        return self._loops.predict(handler, callbacks)

    @on_all_workers
    def verify(
        self,
        x: Any,
        y: Any = None,
        steps: int = 3,
        batch_size: int | None = None,
        sample_weight: Any = None,
    ) -> str:
        """Compares steps of training, evaluation and prediction with plain Keras on one device.

        Each step uses a few rows of the first batch. Model, optimizer and random states are
        restored afterwards. `fit` does the same for its first steps: see `verify` of `Trainer`.

        Example:
            >>> trainer = tfdist.Trainer(build_model, devices=2)
            >>> for line in trainer.verify(x, y, steps=2).splitlines():
            ...     print(line.partition(" (")[0])
            verified: 2 train steps match plain Keras on one device
            verified: 2 test steps match plain Keras on one device
            verified: 2 predict steps match plain Keras on one device

        Args:
            x: As in `fit`.
            y: As in `fit`.
            steps: Number of steps.
            batch_size: Size of the global batch.
            sample_weight: As in `fit`.

        Returns:
            A line for each kind of step, with the time that it took.

        Raises:
            VerificationError: A value differs by more than rounding.
        """
        options = {"y": y, "sample_weight": sample_weight, "batch_size": batch_size}
        build.check_trainable(self.model)
        of = self._run.functions
        create: dict[Loop, Callable[[DataHandler], Any]] = {
            "train": of.train, "test": of.evaluate, "predict": of.predict
        }  # fmt: skip
        lines = []
        for loop, function in create.items():
            data = DataHandler(self.strategy, x, shuffle=False, **self._data_checks, **options)
            lines.append(self._self_check.verify(loop, data, function(data), steps))
        return "\n".join(lines)

    @on_all_workers
    def plan(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        sample_weight: Any = None,
    ) -> list[DeviceMemory]:
        """Predicts the memory of a training step on each device, without running one.

        Example:
            >>> trainer = tfdist.Trainer(build_model, devices=2)
            >>> for device in trainer.plan(x, y, batch_size=64):
            ...     print(device.role, device.total < 1_000_000)
            device 1 True
            device 2 True

        Args:
            x: As in `fit`; only the shapes and dtypes matter.
            y: As in `fit`.
            batch_size: Size of the global batch; None: that of the data.
            sample_weight: As in `fit`.

        Returns:
            The bytes of weights, gradients, optimizer state and activations of each device.

        Raises:
            ConfigurationError: The data has an unknown size, or there are several processes.
            UnsupportedModelError: The memory of the model cannot be predicted.
        """
        if self.strategy.group.size > 1:
            raise ConfigurationError(
                "plan predicts the devices of one process, but this is one of "
                f"{self.strategy.group.size}. Run tfdist plan memory for several processes."
            )
        build.check_trainable(self.model)
        options = {"y": y, "sample_weight": sample_weight, "batch_size": batch_size}
        data = DataHandler(self.strategy, x, shuffle=False, **options)
        spec = data.element_spec
        rows = batch_size or data.batch_size or keras.tree.flatten(spec)[0].shape[0]
        if rows is None:
            raise ConfigurationError("The batch size of the data is unknown. Pass batch_size.")
        batch = functools.partial(zeros, spec)
        return StepPlanner(self.model, self.strategy, self._options, batch).devices(rows)

    @on_all_workers
    def save(self, path: str | os.PathLike[str]) -> None:
        """Saves the model on rank 0, and returns on every rank when the file is complete.

        Example:
            >>> trainer = tfdist.Trainer(build_model, devices=2)
            >>> trainer.save("model.keras")
            >>> keras.saving.load_model("model.keras").count_params()
            2410

        Args:
            path: A file that ends in `.keras` or `.weights.h5`, or a folder without a suffix for a
                SavedModel.

        Raises:
            ConfigurationError: The file cannot be written.
        """
        model_methods.save(self.model, self.strategy, path)

    @property
    def is_chief(self) -> bool:
        """Whether this process is rank 0, which writes files and prints.

        Example:
            >>> tfdist.Trainer(build_model, devices=2).is_chief
            True
        """
        return self.strategy.group.is_chief

    def print(self, *values: object, **options: Any) -> None:
        """Prints on rank 0 only. Arguments are as for the built-in `print`.

        Example:
            >>> trainer = tfdist.Trainer(build_model, devices=2)
            >>> trainer.print("learning rate:", 0.1)
            learning rate: 0.1
        """
        if self.is_chief:
            print(*values, **options)

    def wait_for_everyone(self) -> None:
        """Waits until all workers have called this method.

        Example:
            >>> trainer = tfdist.Trainer(build_model, devices=2)
            >>> trainer.wait_for_everyone()
        """
        self.strategy.group.barrier()

    def describe(self, weights: bool = False) -> dict[str, str]:
        """Returns the rows of the start-up table. After this call, `fit` prints no warning.

        Example:
            >>> trainer = tfdist.Trainer(build_model, devices=2, accumulate=4)
            >>> trainer.describe()["accumulation"]
            '4 rounds'
            >>> for path, where in trainer.describe(weights=True).items():
            ...     if path.endswith("kernel"):
            ...         print(where)
            ...         break
            float32 (64, 32), 8.19 kB on CPU:0

        Args:
            weights: Whether to add a row for each weight that exists: its dtype, its shape, and the
                bytes of its copy or shard on each device. Other replicas get copies in `fit`.
        """
        of_weights = {
            variable.path: f"{variable.dtype} {tuple(variable.shape)}, "
            + ", ".join(
                f"{units.format_bytes(num_bytes)} on {connection.short(device)}"
                for device, num_bytes in bytes_by_device([variable]).items()
            )
            for variable in (self.model.variables if weights else ())
        }
        return (
            self.strategy.describe()
            | of_weights
            | {
                "accumulation": f"{self.accumulate} rounds" if self.accumulate > 1 else "none",
                "precision": self.model.dtype_policy.name,
                "XLA": self._run.functions.described_xla(),
                "sync BatchNorm": "yes" if self.sync_batch_norm else "no",
                "remat": remat_of_layers.described(self.model, self.remat),
                "activations": "on the host" if self._options.offload_activations else "on devices",
                "not exact": self._exactness.reported(),
                "versions": features.tested(),
                "verified": self._self_check.status,
            }
        )

    def _checkpointing(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        handlers: EpochDataHandlers,
        validation: ValidationData | None,
    ) -> CheckpointHooks:
        number = self.last_fit.number
        if self.checkpoints is not None:
            number += 1
            saves_frozen = self.checkpoints.frozen
            state = TrainingState(self._run, callbacks, handlers, validation, saves_frozen)
            settings, rank_checks = self.checkpoints.of_fit(number), self._loops.rank_checks
            self.last_fit = Checkpointing(settings, number, self._run, state, rank_checks)
        elif self._on_nan == "checkpoint":
            raise ConfigurationError(
                "on_nan='checkpoint' needs a folder for checkpoints: set checkpoints too."
            )
        else:
            self.last_fit = CheckpointHooks(number)
        return self.last_fit

    def _validation(
        self, data: Any, batch_size: int | None, steps: int | None
    ) -> tuple[Callable[[keras.callbacks.CallbackList], Logs], ValidationData | None]:
        """Returns a function that evaluates during training, from the start of the data.

        Returns:
            The function, and the data unless an override of `evaluate` reads them.
        """
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        options = {"y": y, "sample_weight": weight, "batch_size": batch_size}
        if overrides(self.model, "evaluate"):
            # As in Keras: an override of `fit` may have preprocessed the data already.
            options[keras_training.WITHIN_FIT] = True
            return lambda callbacks: self.evaluate(
                x, steps=steps, callbacks=callbacks, return_dict=True, **options
            ), None
        options |= {"steps_per_epoch": steps, "shuffle": False, **self._data_checks}
        data = ValidationData(self.strategy, x, **options)
        return lambda callbacks: self._loops.evaluate(data.handler(), callbacks), data

    def _callback_list(
        self,
        callbacks: Any,
        verbose: str | int,
        epochs: int,
        steps: int | None,
        history: bool = True,
    ) -> keras.callbacks.CallbackList:
        """Returns Keras's container of callbacks, with a progress bar unless `verbose=0`."""
        progress = ProgressBar(self.stats) if verbose and self.strategy.group.is_chief else None
        return create_callback_list(
            callbacks, progress, self.strategy,
            model=self.model, verbose=verbose, epochs=epochs, steps=steps, add_history=history,
        )  # fmt: skip


def _check_choice(option: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigurationError(f"{option}={value!r}: expected one of {', '.join(choices)}.")


def _check_steps(option: str, value: Any, *others: Any) -> None:
    if value not in others and not (type(value) is int and value >= 1):
        raise ConfigurationError(f"{option}={value!r}: expected a number of steps from 1.")
