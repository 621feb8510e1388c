"""Replaces the training methods of `keras.Model`, and undoes it.

This is the only place where methods of Keras stay replaced for longer than one call. `start` enters
one list of patches and `stop` leaves it.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf
from keras.callbacks import CallbackList

from tfdist import cluster, strategies
from tfdist.callbacks.step_log import StepLog
from tfdist.console import tracebacks
from tfdist.errors import ConfigurationError, DataError, UnsupportedModelError, first_line
from tfdist.loops import model_methods
from tfdist.loops.data_handler import OneBatch
from tfdist.loops.epoch import check_same_batches
from tfdist.loops.functions import Loop
from tfdist.loops.outputs import concatenated
from tfdist.script import Options, tf_distribute
from tfdist.strategies import mirrored_variables
from tfdist.strategies.base import Strategy
from tfdist.trainer import Trainer, on_all_workers
from tfdist.upstream import (
    features,
    input_data,
    keras_model,
    keras_training,
    tensorflow_runtime,
)
from tfdist.upstream.patching import all_replaced, replace, replaced

_METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_FILES = ("save", "save_weights", "export")
#: The attribute of a model that holds its trainer: a cycle, which Python can collect.
_TRAINER = "_tfdist_trainer"

_active: Runner | None = None


def start(options: Options) -> Runner:
    """Installs all patches, and returns the runner that they call."""
    global _active
    if keras.backend.backend() != "tensorflow":
        raise ConfigurationError(
            f"Keras uses the backend {keras.backend.backend()!r}, but tfdist needs TensorFlow. Set "
            "KERAS_BACKEND=tensorflow."
        )
    _active = Runner(options)
    return _active


def stop() -> None:
    """Removes all patches, if there are any."""
    global _active
    if _active is not None:
        _active.close()
    _active = None


def active() -> Runner | None:
    """Returns the runner whose patches are installed."""
    return _active


class _FitLog(StepLog):
    """A log that begins anew, unless a checkpoint has restored its state."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if not self._last_step:
            self._path.unlink(missing_ok=True)
        super().on_epoch_begin(epoch, logs)


class ScriptTrainer(Trainer):
    """The trainer of a script's model, with Keras's methods for one batch.

    Some strategies replace the `tf.Variable` of a weight. A `tf.function` of the script that was
    traced before still reads the original one, which therefore gets the values after each call.
    """

    def __init__(self, model: keras.Model, strategy: Strategy, **options: Any) -> None:
        #: By `id` of a weight: the resource of its variable, and the value after the last call.
        #: The resource exists as long as a function captures it.
        self._originals: dict[int, tuple[weakref.ref[Any], Any]] = {
            id(weight): (weakref.ref(variable.handle), None)
            for weight in model.variables
            if (variable := keras_model.variable_of(weight)) is not None
        }
        super().__init__(lambda: model, strategy, **options)
        self.step_log: StepLog | None = None

    def _callback_list(self, callbacks: Any, *args: Any, **options: Any) -> Any:
        log, self.step_log = self.step_log, None
        if log is None:
            return super()._callback_list(callbacks, *args, **options)
        given = callbacks.callbacks if isinstance(callbacks, CallbackList) else callbacks or []
        return super()._callback_list([*keras.tree.flatten(given), log], *args, **options)

    def _replaced(self) -> Iterator[tuple[keras.Variable, Any, Any]]:
        """Yields weights, resources and values where a function still has the resource."""
        for weight in self.model.variables if self._originals else ():
            reference, value = self._originals.get(id(weight), (lambda: None, None))
            handle, now = reference(), keras_model.variable_of(weight)
            if handle is not None and (now is None or now.handle is not handle):
                yield weight, handle, value

    def take_from_originals(self) -> None:
        """Assigns to the weights what a function of the script wrote since the last call."""
        for weight, handle, value in self._replaced():
            written = tf.raw_ops.ReadVariableOp(resource=handle, dtype=weight.dtype)
            if value is not None and not np.array_equal(written, value):
                weight.assign(written)

    def give_to_originals(self) -> None:
        """Assigns the weights to the original variables that functions of the script read."""
        for weight, handle, _ in self._replaced():
            value = tf.convert_to_tensor(weight.value)
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)
            self._originals[id(weight)] = weakref.ref(handle), value

    def variables(self) -> list[keras.Variable]:
        """Returns all variables that the steps read and write."""
        return self._run.functions.all_variables()

    @on_all_workers
    def on_batch(self, loop: Loop, given: dict[str, Any]) -> Any:
        """Runs `train_on_batch`, `test_on_batch` or `predict_on_batch` with Keras's arguments."""
        weight, by_class = given.get("sample_weight"), given.get("class_weight")
        if by_class is not None:
            if weight is not None:
                raise DataError("Pass sample_weight or class_weight, not both.")
            weight = input_data.weights_of_classes(given["y"], by_class)
        data = OneBatch(self.strategy, given["x"], given.get("y"), weight)
        functions = self._run.functions
        if loop == "predict":
            steps = functions.predict(data)
        else:
            steps = (functions.train if loop == "train" else functions.evaluate)(data, True)
            if features.RESETS_METRICS:
                self.model.reset_metrics()
        self._self_check.at_first_use(loop, data, steps)
        functions.sync_before_batch()
        result, logs = steps(data.begin_epoch(0, steps.needs_full_batch), 1)
        check_same_batches(self.strategy.group.gather([result.checksum])[:, 0], 1)
        if loop == "predict":
            return keras_training.as_arrays(concatenated(logs))
        as_dict = given.get("return_dict", False)
        return logs if as_dict else keras_training.in_order_of_metrics(self.model, logs)


class Runner:
    """Trains every model of a script with a `Trainer` that keeps the very model."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.strategy_object: Strategy | None = None
        #: Whether ranks may act differently, so that saving a file must not wait for others.
        self.script_knows_rank = False
        self.left_to = ""  # what distributes the script instead
        self._running = False
        self._num_fits, self.num_trainers = 0, 0
        self._strategies: dict[str, Strategy] = {}
        self._models = weakref.WeakSet[keras.Model]()
        self._backend = os.environ.get("KERAS_BACKEND")
        self._stack = ExitStack()
        for patch in self._patches():
            self._stack.enter_context(patch)

    def _patches(self) -> Iterator[AbstractContextManager[Any]]:
        """Yields all replacements that outlast a call."""
        yield all_replaced(
            keras.Model, {name: self._method(getattr(keras.Model, name)) for name in _METHODS}
        )
        yield replaced(keras.distribution, "set_distribution", self._use_distribution)
        yield tf_distribute.replaced_strategies(self)
        if cluster.size() > 1:
            yield all_replaced(
                keras.Model, {name: self._file(getattr(keras.Model, name)) for name in _FILES}
            )
            yield replaced(keras.Model, "load_weights", saying_who_writes(keras.Model.load_weights))
            for module in (keras.saving, keras.models):
                yield replaced(module, "save_model", self._file(module.save_model))
                yield replaced(module, "load_model", saying_who_writes(module.load_model))

    def close(self) -> None:
        """Removes the patches, and the trainers from the models."""
        tensorflow_runtime.start_without_hook()
        self._stack.close()
        for model in list(self._models):
            trainer: ScriptTrainer = vars(model).pop(_TRAINER)
            mirrored_variables.forget(trainer.variables())
            keras_model.use_xla_by_default(model)

    # ---- the strategy ----

    def connect(self) -> Strategy:
        """Returns the strategy; created on the first call."""
        if self.strategy_object is None:
            self.use(self._options.strategy, self._options.devices)
        assert self.strategy_object is not None
        return self.strategy_object

    def use(self, strategy: Any, devices: Any = None, **options: Any) -> Strategy:
        """Creates a strategy for the models that are trained for the first time from now on."""
        key = f"{strategy!r} {devices!r} {options!r}"
        if key not in self._strategies:
            tensorflow_runtime.start_without_hook()
            self._strategies[key] = self._created(strategy, devices, options)
        self.strategy_object = self._strategies[key]
        return self.strategy_object

    def _created(self, strategy: Any, devices: Any, options: dict[str, Any]) -> Strategy:
        created = strategies.create(strategy, devices, **options)
        if created.group.is_chief:
            names, number = ", ".join(created.devices), created.num_replicas
            print(f"tfdist: strategy {created.name}, replicas: {number} ({names})", file=sys.stderr)
        if created.num_replicas > 1:  # replicas may have all-reduces, which XLA cannot compile
            self._stack.enter_context(keras_model.use_xla_by_default_if(lambda model: False))
        return created

    @property
    def chooses_strategy(self) -> bool:
        """Whether the user left the choice of the strategy to tfdist or to the script."""
        return self._options.strategy == strategies.AUTO and self._options.devices is None

    def leave(self, other: str) -> None:
        """Leaves the distribution to what the script uses for it, unless options need tfdist."""
        if self.left_to:
            return
        default = Options()
        given = [name for name in vars(default) if vars(self._options)[name] != vars(default)[name]]
        if given:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ConfigurationError(
                f"{flags} has no effect, because {other} distributes this script. Remove it."
            )
        self.left_to = other
        self.close()

    def _use_distribution(self, value: Any) -> None:
        """Honors `keras.distribution.set_distribution`, which Keras ignores on TensorFlow."""
        # Over several processes, `DataParallel` is what their strategy does.
        is_data_parallel = isinstance(value, keras.distribution.DataParallel)
        if not self.chooses_strategy or (cluster.size() > 1 and is_data_parallel):
            self.connect()
        else:
            self.use(strategies.AUTO if value is None else value)

    # ---- fit, evaluate, predict, and one batch ----

    def _method(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(model: keras.Model, *args: Any, **options: Any) -> Any:
            has_loss = model.compiled or original.__name__.startswith("predict")
            if not (has_loss and self._takes(model)):
                return original(model, *args, **options)
            return self._run(model, original, args, options)

        return call

    def _run(self, model: keras.Model, original: Any, args: Any, options: dict[str, Any]) -> Any:
        name = original.__name__
        self._running = True
        try:
            trainer = self._trainer(model)
            trainer.take_from_originals()
            with keras_model.without_default_xla(model, trainer.strategy.num_replicas > 1):
                if name.endswith("on_batch"):
                    given = inspect.signature(original).bind(model, *args, **options).arguments
                    result = trainer.on_batch(cast(Loop, name.partition("_")[0]), given)
                else:
                    if name == "fit":
                        self._begin_fit(trainer)
                    model_methods.note_override(trainer, name)
                    result = getattr(trainer, name)(*args, **options)
            trainer.give_to_originals()
            return result
        except (ConfigurationError, UnsupportedModelError) as error:
            if not self._options.fallback or self.connect().group.size > 1:
                raise
            what = f"{type(model).__name__}.{name}"
            warnings.warn(f"{what} runs on one device: {first_line(error)}", stacklevel=3)
            return original(model, *args, **options)
        finally:
            self._running = False

    def _takes(self, model: keras.Model) -> bool:
        """Returns whether a call is the script's: not Keras's own, nor made during another call."""
        if self._running or self.left_to or tf.distribute.has_strategy():
            return False
        return _TRAINER in vars(model) or not any(
            isinstance(v.value, tf.distribute.DistributedValues) for v in model.variables
        )

    def _trainer(self, model: keras.Model) -> ScriptTrainer:
        """Returns the trainer of a model, with the very model, optimizer and metrics."""
        trainer = vars(model).get(_TRAINER)
        if trainer is None:
            self._check_backend()
            names = ("accumulate", "sync_batch_norm", "remat", "verify", "log_every")
            options = {name: vars(self._options)[name] for name in names}
            trainer = ScriptTrainer(model, self.connect(), **options)
            model_methods.write_on_all(model)  # the runner's own methods write on the chief
            replace(model, _TRAINER, trainer)
            self._models.add(model)
            self.num_trainers += 1
        return trainer

    def _check_backend(self) -> None:
        """Refuses a script that chose another backend when Keras was already imported."""
        chosen = os.environ.get("KERAS_BACKEND", "tensorflow")
        if self._backend is None and chosen != "tensorflow":
            raise ConfigurationError(
                f"The script sets KERAS_BACKEND={chosen}, but tfdist trains on TensorFlow, whose "
                "results may differ. To train on TensorFlow, set KERAS_BACKEND=tensorflow in the "
                "environment of the command."
            )

    def _begin_fit(self, trainer: ScriptTrainer) -> None:
        """Gives a `fit` the checkpoints and the log of its position in the script."""
        checkpoints, every = self._options.checkpoints, self._options.log_every
        trainer.checkpoints, trainer.last_fit.number = checkpoints, self._num_fits
        self._num_fits += 1
        if every is not None:
            path = Path(f"metrics-{self._num_fits}.jsonl")
            trainer.step_log = _FitLog(path, trainer.stats, every)
        if checkpoints is not None and cluster.is_chief():
            self._note_position(os.fspath(checkpoints.folder))

    def _note_position(self, folder: str) -> None:
        """Notes the line of a `fit` in a file beside the checkpoints, or compares them."""
        tf.io.gfile.makedirs(folder)
        path = os.path.join(folder, "fits.txt")  # noqa: PTH118 - may be a URL
        text = tf.io.gfile.GFile(path).read() if tf.io.gfile.exists(path) else ""
        position = f"fit {self._num_fits}: {tracebacks.caller()}"
        before = text.splitlines()[self._num_fits - 1 :][:1]
        if not before:
            with tf.io.gfile.GFile(path, "w") as file:
                file.write(f"{text}{position}\n")
        elif before != [position]:
            raise ConfigurationError(
                f"{path} has checkpoints of another script, or of this one before it was edited: "
                f"its {before[0]!r} is now {position!r}. Restore the script, or use another folder."
            )

    # ---- files ----

    def _file(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Makes a method write on the chief only, and return when the file is complete."""

        @functools.wraps(original)
        def call(*args: Any, **options: Any) -> Any:
            result = None
            if self.left_to or cluster.is_chief():
                result = original(*args, **options)
            if not (self.left_to or self.script_knows_rank or self._running):
                self.connect().group.barrier()
            return result

        return call


def saying_who_writes(load: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose errors say why a rank may miss a file that the chief wrote."""

    @functools.wraps(load)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return load(*args, **options)
        except (OSError, ValueError) as error:
            error.add_note(
                "Only rank 0 writes files of Keras. Their names must be the same on all ranks, "
                "without times, process ids and temporary folders, and on a shared disk."
            )
            raise

    return call if not cluster.is_chief() else load
