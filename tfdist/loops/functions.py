"""The compiled functions of one model under one strategy, created when the data is known."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfdist import compile_cache
from tfdist.custom_step import trial
from tfdist.custom_step.step import CustomStep
from tfdist.errors import (
    ConfigurationError,
    DataError,
    OutOfMemoryError,
    TfdistError,
    UnsupportedModelError,
)
from tfdist.loops.data_handler import DataHandler
from tfdist.loops.model_methods import ModelFunction, check_function
from tfdist.loops.outputs import Outputs
from tfdist.model_setup import build, create
from tfdist.precision import policy
from tfdist.replica.program_state import watch_program
from tfdist.replica.replica import StepOptions
from tfdist.rows import Rows
from tfdist.step.accumulation import GradientAccumulation
from tfdist.step.loss_scaling import Scaling
from tfdist.step.state import ForwardState, MetricResults, flat
from tfdist.step.step import EvaluateStep, TrainStep
from tfdist.strategies import inner_loop
from tfdist.strategies.base import Strategy
from tfdist.strategies.inner_loop import Logs, LoopResult, Step
from tfdist.strategies.variables import ReplicaSync
from tfdist.upstream.keras_losses import seeds_of_compiled
from tfdist.upstream.keras_model import (
    compile_config,
    metrics_variables_of,
    overrides,
    recurrent_states,
    redefined,
)
from tfdist.upstream.keras_optimizers import custom_step_of, optimizers_of, variables_of
from tfdist.upstream.keras_training import metrics_or_logs
from tfdist.upstream.keras_variables import ShardedVariable

#: Keras's names of its loops, as in the names of callbacks' methods.
Loop = Literal["train", "test", "predict"]

#: Runs up to a number of steps, each on a batch of the iterator. Returns the number of steps and
#: other results, and the logs after the last step.
StepsFn = Callable[[Iterator[Any], int], tuple[LoopResult, Logs]]


@dataclass(frozen=True)
class Steps:
    """The compiled steps of a loop.

    Attributes:
        run: A `StepsFn`; in predictions, it returns outputs in place of logs.
        needs_full_batch: Whether every replica gets full batches.
    """

    run: Callable[[Iterator[Any], int], tuple[LoopResult, Any]]
    needs_full_batch: bool

    def __call__(self, iterator: Iterator[Any], num_steps: int) -> tuple[LoopResult, Any]:
        return self.run(iterator, num_steps)


class CompiledFunctions:
    """Traces the functions that compute on the replicas, and caches them."""

    def __init__(self, model: keras.Model, strategy: Strategy, options: StepOptions) -> None:
        self._model, self._strategy, self._options = model, strategy, options
        watch_program(model)
        self._compilation: Any = None
        self._steps: dict[tuple[bool, ...], StepsFn] = {}
        # Functions for other data share a step, and with it the accumulated gradients.
        self._train_step: TrainStep | None = None
        self._evaluate_step: EvaluateStep | None = None
        # IDs of the trainable variables of a training step that has not run yet.
        self._trainable: list[int] | None = None
        self._outputs = Outputs(model, strategy, options)
        self._full_batch_mode = FullBatchMode(model, strategy, options.accumulate)
        self._custom_steps = CustomSteps(model, strategy, options)
        self._model_functions: dict[Loop, ModelFunction] = {}
        # The IDs of the model's variables, and the object that re-synchronizes them.
        self._frequent_sync: tuple[list[int], ReplicaSync] | None = None

    def train(self, data: DataHandler, one_by_one: bool = False) -> Steps:
        """Returns the inner loop of training, or a new one if the model was compiled again."""
        return self._inner_loop(data, one_by_one, training=True)

    def evaluate(self, data: DataHandler, one_by_one: bool = False) -> Steps:
        """Returns the inner loop of evaluation, as `train`."""
        return self._inner_loop(data, one_by_one, training=False)

    def predict(self, data: DataHandler) -> Steps:
        """Returns the function that computes the outputs for batches."""
        check_function(self._model, "predict")
        needs_full_batch = self._full_batch_reason(data, "predict") is not None
        self._strategy.variables.place(self._model)
        is_first = not (self._steps or self._outputs.is_traced)
        if is_first and self._model.compiled and self._strategy.group.size > 1:
            self._strategy.variables.prepare(self._model, optimizers_of(self._model))
        return Steps(self._outputs.function(data, needs_full_batch), needs_full_batch)

    def begin(self, loop: Loop) -> None:
        """Lets the model make its function for batches again, as at the beginning of each loop."""
        if compile_config(self._model) is self._compilation and loop in self._model_functions:
            self._model_function(loop).make()

    def _model_function(self, loop: Loop) -> ModelFunction:
        if loop not in self._model_functions:
            self._model_functions[loop] = ModelFunction(self._model, loop)
            self._model_functions[loop].make()
        return self._model_functions[loop]

    def epoch_logs(self, logs: Logs, loop: Loop) -> Logs:
        """Returns the logs of an epoch, given those after its last step.

        As in Keras, a step of the user's, or a `make_train_function` that returns other values for
        metrics, changes the logs of batches only.
        """
        custom = self._custom_steps.existing(loop == "train")
        if custom is None and redefined(self._model, f"make_{loop}_function") is None:
            return logs
        return _as_floats(metrics_or_logs(self._model, logs))

    def described_xla(self) -> str:
        """Returns what XLA compiles of a training step, for the start-up table."""
        model, strategy, step = self._model, self._strategy, self._custom_steps.existing(True)
        is_alone = strategy.num_replicas * self._options.accumulate == 1
        if not (model.jit_compile and strategy.variables.are_local):
            return "no"
        if step is not None or custom_step_of(model, training=True) is not None:
            whole = "the whole step" if step else "the whole step, if XLA can compile it"
            return whole if is_alone and (step is None or step.in_xla) else "no"
        is_refused = self._train_step is not None and self._train_step.refused_by_xla
        several = "the update" if is_refused else "forward and backward pass, and the update"
        return "the whole step" if is_alone else several

    def sync_copies(self) -> None:
        """Re-synchronizes the replicas after user code may have changed the model."""
        self._strategy.variables.sync_copies(self.all_variables())

    def sync_before_batch(self) -> None:
        """Re-synchronizes the replicas as `sync_copies` does, faster when called repeatedly."""
        if self._frequent_sync is None or self._frequent_sync[0] != _ids(self._model.variables):
            self.sync_copies()
        self.frequent_sync().sync_all()

    def frequent_sync(self) -> ReplicaSync:
        """Returns a faster `sync_copies` for repeated calls. The variables must be in sync now."""
        ids = _ids(self._model.variables)
        if self._frequent_sync is None or self._frequent_sync[0] != ids:
            self._frequent_sync = ids, self._strategy.variables.frequent_sync(self.all_variables())
        return self._frequent_sync[1]

    def all_variables(self) -> list[keras.Variable]:
        """Returns the variables of `variables` in one list."""
        return [v for group in self.variables().values() for v in group]

    @contextmanager
    def trial_steps(self) -> Iterator[None]:
        """A context for steps that do not count as the first: weights may still be frozen."""
        before = self._trainable
        yield
        self._trainable = before

    def variables(self) -> dict[str, list[keras.Variable]]:
        """Returns all variables that steps read and write, by owner, each once."""
        model, groups = self._model, dict[str, list[keras.Variable]]()
        if model.compiled:
            groups["metrics"] = metrics_variables_of(model)
        groups["model"] = model.variables
        groups["recurrent states"] = recurrent_states(model)
        if model.compiled:
            for number, optimizer in enumerate(optimizers_of(model), 1):
                groups[f"optimizer {number}"] = variables_of(optimizer)
        groups["loss scale"] = self._train_step.scaling.variables if self._train_step else []
        groups["steps"] = self._custom_steps.variables
        groups["seeds"] = seeds_of_compiled(model) if model.compiled else []
        seen: set[int] = set()
        for name, variables in groups.items():
            new = {id(v): v for v in variables if id(v) not in seen}
            groups[name] = list(new.values())
            seen |= new.keys()
        return groups

    @property
    def accumulation(self) -> GradientAccumulation | None:
        """The accumulated gradients of the training step."""
        return self._train_step.accumulation if self._train_step else None

    def _full_batch_reason(self, data: DataHandler, loop: Loop) -> str | None:
        """Builds the model's weights, and returns why it needs full batches, if it does."""
        with policy(self._options.precision):
            build.build_weights(self._model, self._strategy, data.element_spec)
        return self._full_batch_mode.for_data(data, loop)

    def _inner_loop(self, data: DataHandler, one_by_one: bool, training: bool) -> Steps:
        model, strategy = self._model, self._strategy
        self._adopt_compilation()
        custom = self._custom_steps.step(data, training)
        if custom is not None and training and self._options.remat != "none":
            raise ConfigurationError(
                f"remat={self._options.remat!r} does not apply to a custom step, as "
                f"{custom.cause} makes it. Create its layers in a keras.RematScope instead."
            )
        if training and self._options.offload_activations and (custom or model.jit_compile):
            cause, fix = "a custom train_step", "Remove one of the two."
            if custom is None:  # by default on one GPU
                cause, fix = "XLA", "Compile the model with jit_compile=False (--no-jit-compile)."
            raise ConfigurationError(
                f"offload_activations does not apply to {cause}, which decides where tensors are. "
                + fix
            )
        loop: Loop = "train" if training else "test"
        reason = custom.full_batch_reason if custom else self._full_batch_reason(data, loop)
        if training and self._trainable not in (None, _ids(model.trainable_variables)):
            self._discard_steps()  # a callback froze weights before the first step, as Keras allows
        key = (training, data.may_end, data.own_rows, one_by_one)
        if key not in self._steps:
            if custom is None:
                if training:
                    create.check_optimizer(model)
                with policy(self._options.precision):
                    build.build_for_training(
                        model, strategy, data.element_spec, data.first_batch, training
                    )
                strategy.variables.prepare(model, optimizers_of(model))
            if training and not any(trains for trains, *_ in self._steps):
                self._trainable = _ids(model.trainable_variables)
            with strategy.scope():
                step = custom or self._own_step(data, training, reason)
            traced = self._traced(step, data, one_by_one)
            self._steps[key] = self._model_function(loop).around(traced, self.sync_copies)
        return Steps(self._steps[key], reason is not None)

    def _adopt_compilation(self) -> None:
        """Discards all steps if the model was compiled again, with another optimizer or loss."""
        model = self._model
        if self._compilation is compile_config(model):
            return
        self._discard_steps()
        self._custom_steps.forget()
        self._model_functions.clear()
        self._frequent_sync = None
        watch_program(model)
        create.adopt(model, self._strategy, self._options.precision, self._options.loss_scale)
        self._compilation = compile_config(model)

    def _discard_steps(self) -> None:
        self._steps.clear()
        self._full_batch_mode.forget_rows()
        self._train_step = self._evaluate_step = self._trainable = None

    def _own_step(self, data: DataHandler, training: bool, reason: str | None) -> Step:
        """Returns the step for a model whose class does not override it, created at first use."""
        step = self._train_step if training else self._evaluate_step
        if step is not None:
            return step
        model, strategy, options = self._model, self._strategy, self._options
        rows = self._full_batch_mode.rows("train" if training else "test", data)
        if reason is None and strategy.num_replicas * options.accumulate > 1:
            rows.reductions.read_first_batch()
        writes_alone, bucket_bytes = strategy.variables.writes_alone, strategy.exchange.bucket_bytes
        state = ForwardState(model, rows, options, writes_alone, bucket_bytes)
        results = self._custom_steps.metric_results(data)
        if not training:
            self._evaluate_step = EvaluateStep(model, strategy, state, options, reason, results)
            return self._evaluate_step
        scaling = Scaling(model.optimizer, options.loss_scale)
        self._train_step = TrainStep(model, strategy, state, scaling, options, reason, results)
        return self._train_step

    def _traced(self, step: Step, data: DataHandler, one_by_one: bool) -> StepsFn:
        """Returns the inner loop of a step, with errors that explain problems with the data."""
        model, strategy = self._model, self._strategy
        if model.jit_compile and not strategy.variables.are_local:
            warnings.warn(
                "jit_compile=True is ignored, because XLA cannot read variables on another device, "
                "as this strategy has them.",
                stacklevel=7,
            )
        in_graph = inner_loop.one_step_in_graph if one_by_one else inner_loop.in_graph
        loop = inner_loop.eager if model.run_eagerly else in_graph
        uneven_data = data.uneven_data if step.training else "pad"
        steps = strategy.feed.compile(step, loop, data.may_end, data.own_rows, uneven_data)
        as_tensor = functools.lru_cache(maxsize=8)(tf.constant)

        def call(iterator: Iterator[Any], num_steps: int) -> tuple[LoopResult, Logs]:
            if step.training:
                self._trainable = None
            try:
                # Inside the try block, so that a lost process is not reported as a data error.
                with strategy.translate_errors(), strategy.variables.collective_section():
                    result, logs = steps(iterator, as_tensor(num_steps))
            except TfdistError:
                raise
            except (ValueError, TypeError, tf.errors.OpError) as error:
                if (cause := compile_cache.cause_of(error)) is not None:
                    raise ConfigurationError(cause) from error
                if isinstance(error, tf.errors.ResourceExhaustedError):
                    raise OutOfMemoryError(build.out_of_memory_message(error)) from error
                raise DataError(build.mismatch_message(model, data.element_spec, error)) from error
            return LoopResult(*(np.asarray(v).item() for v in result)), _as_floats(logs)

        return call


class FullBatchMode:
    """Decides, once for each of Keras's loops, whether a model needs full batches."""

    def __init__(self, model: keras.Model, strategy: Strategy, accumulate: int) -> None:
        self._model, self._strategy, self._accumulate = model, strategy, accumulate
        self._reasons: dict[Loop, str | None] = {}
        self._rows: dict[Loop, Rows] = {}

    def rows(self, loop: Loop, data: DataHandler) -> Rows:
        """Returns how the model treats the rows of the data in a loop, with which it decides."""
        if loop not in self._rows:
            self._rows[loop] = Rows(self._model, data.first_batch, data.element_spec)
        return self._rows[loop]

    def forget_rows(self) -> None:
        """Forgets what it knows of losses and weights, for other ones."""
        self._rows.clear()

    def for_data(self, data: DataHandler, loop: Loop) -> str | None:
        """Returns why the model needs full batches, if it does."""
        if loop not in self._reasons:
            self._reasons[loop] = self._reason(data, loop)
        return self._reasons[loop]

    def _reason(self, data: DataHandler, loop: Loop) -> str | None:
        training = loop == "train"
        if self._strategy.num_replicas * (self._accumulate if training else 1) == 1:
            return None
        # Replicas can exchange the rows of a batch of dense numbers only.
        if loop != "predict" and not all(
            spec is None or (isinstance(spec, tf.TensorSpec) and spec.dtype != tf.string)
            for spec in tf.nest.flatten(data.element_spec)
        ):
            for name in ("compute_loss", "compute_metrics"):
                if overrides(self._model, name):
                    rows = f"{name} gets strings, ragged or sparse tensors of all rows"
                    warnings.warn(full_batch_warning(rows), stacklevel=2)
                    return rows
        try:
            reason = self.rows(loop, data).full_batch_reason(training, predicts=loop == "predict")
        except DataError:
            if not data.own_rows:  # with a dataset per worker, other workers may have data
                raise
            reason = None
        by_worker = self._strategy.group.gather([reason is not None])
        if reason is None and np.any(by_worker):
            reason = "another worker found rows that depend on each other"
        if reason is not None and reason not in self._reasons.values():
            warnings.warn(full_batch_warning(reason), stacklevel=2)
        return reason


def full_batch_warning(reason: str) -> str:
    """Returns the warning about full-batch mode."""
    return (
        f"Full-batch mode, because {reason}: every replica computes the full batch. The results "
        "match one device, but training is no faster."
    )


class CustomSteps:
    """Creates the steps that a model redefines, once for training and once for evaluation."""

    def __init__(self, model: keras.Model, strategy: Strategy, options: StepOptions) -> None:
        self._model, self._strategy, self._options = model, strategy, options
        self._steps: dict[bool, CustomStep | None] = {}
        self._results: MetricResults | None = None

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables that the steps created so far may change."""
        return [v for step in self._steps.values() if step for v in step.variables]

    def existing(self, training: bool) -> CustomStep | None:
        """Returns the step in use, if it is the model's own."""
        return self._steps.get(training)

    def forget(self) -> None:
        """Discards all steps, for a model that was compiled again."""
        self._steps.clear()
        self._results = None

    def metric_results(self, data: DataHandler) -> MetricResults:
        """Returns the logs of Keras's own steps. The model is built for training."""
        if self._results is None:
            self._results = MetricResults(self._model, data.element_spec)
        return self._results

    def step(self, data: DataHandler, training: bool) -> CustomStep | None:
        """Returns the custom step of the model.

        Returns:
            None if tfdist's own step does what Keras's does for this model.

        Raises:
            ConfigurationError: `accumulate` is above 1.
            UnsupportedModelError: The step cannot run on several replicas.
        """
        if training not in self._steps:
            cause = self._cause(data, training)
            self._steps[training] = None if cause is None else self._make(data, training, cause)
        return self._steps[training]

    def _cause(self, data: DataHandler, training: bool) -> str | None:
        """Returns what makes the step a custom one, such as `"MyModel.train_step"`, or None."""
        model, strategy = self._model, self._strategy
        if (cause := custom_step_of(model, training)) is None:
            if not overrides(model, "compute_metrics"):
                return None
            with policy(self._options.precision):
                build.build_for_training(model, strategy, data.element_spec, training=training)
            if not self.metric_results(data).need_batch():
                return None
            cause = f"{type(model).__name__}.compute_metrics"
            if any(isinstance(v, ShardedVariable) for v in model.variables):
                raise UnsupportedModelError(
                    f"{cause} returns values that it computes from the batch, for which the "
                    "weights must not be sharded. Return results of metrics, or use strategy "
                    "'mirrored'."
                )
        strategy.check_custom_step(cause)
        return cause

    def _make(self, data: DataHandler, training: bool, cause: str) -> CustomStep:
        model, strategy, options = self._model, self._strategy, self._options
        if training and options.accumulate > 1:
            raise ConfigurationError(
                f"accumulate={options.accumulate} is not supported, because {cause} makes a "
                "custom step. Set gradient_accumulation_steps of its optimizers instead."
            )
        if compile_config(model).config.get("jit_compile") is True and strategy.num_replicas > 1:
            warnings.warn(
                "jit_compile=True is ignored, and random numbers are those of jit_compile=False, "
                f"because XLA cannot compile all-reduces within the custom step of {cause}.",
                stacklevel=7,
            )
        first_batch = functools.cache(data.first_batch)
        name = "train_step" if training else "test_step"
        strategy.variables.unite_new()  # the tapes of the trial watch whole weights
        with policy(options.precision):
            built = trial.build(model, strategy, name, first_batch())
        strategy.variables.prepare(model, optimizers_of(model))
        with strategy.scope():
            step = CustomStep(model, built, strategy, training, first_batch, options, cause)
        if step.full_batch_reason:
            reason = f"{cause} cannot be computed on per-replica batches ({step.full_batch_reason})"
            warnings.warn(full_batch_warning(reason), stacklevel=7)
        return step


def _ids(variables: Iterable[keras.Variable]) -> list[int]:
    return [id(v) for v in variables]


def _as_floats(logs: Logs) -> Logs:
    """Converts scalars to Python floats. A metric with several values stays an array."""
    arrays = {name: np.asarray(value) for name, value in flat(logs).items()}
    return {name: float(a) if a.ndim == 0 else a for name, a in arrays.items()}
