"""How the steps of a trainer are made, beyond what model and strategy say.

The compiled functions of one model under one strategy, made when the data are first known.

Which models are given whole batches, since their rows cannot be computed apart.

The steps that a model's class overrides, each made when its first batch is known.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import ConfigurationError, DataError, OutOfMemoryError, TfdistError
from tfdist.loops.data_handler import DataHandler
from tfdist.loops.outputs import Outputs, OutputsFn
from tfdist.model_setup import build, create
from tfdist.precision import LossScale, Scaling, policy
from tfdist.step.accumulation import GradientAccumulation
from tfdist.step.custom_step import trial
from tfdist.step.custom_step.step import CustomStep, overridden_step
from tfdist.step.evaluate import EvaluateStep
from tfdist.step.lookups import Lookups
from tfdist.step.reductions import ReductionProbe
from tfdist.step.row_independence import full_batch_reason
from tfdist.step.state import ForwardState
from tfdist.step.train import TrainStep
from tfdist.strategies.base import Strategy
from tfdist.strategies.inner_loop import Logs, LoopResult, Step
from tfdist.upstream.keras_layers import read_kernels_outside_of_xla
from tfdist.upstream.keras_model import compile_config
from tfdist.upstream.keras_optimizers import optimizers_of


@dataclass(frozen=True)
class StepOptions:
    """As `Trainer` takes them.

    Attributes:
        accumulate: Rounds of a training step.
        sync_batch_norm: Whether BatchNorm takes global moments.
        precision: Name of the dtype policy to build with; None: Keras's global one.
        loss_scale: How the loss scale moves; None: as the optimizer says.
        recompute: Which layers are computed again on the way back.
    """

    accumulate: int = 1
    sync_batch_norm: bool = False
    precision: str | None = None
    loss_scale: LossScale | None = None
    recompute: str = "none"


#: Makes up to that many steps, each on a batch of the iterator: what was done, and the logs after.
StepsFn = Callable[[Iterator[Any], int], tuple[LoopResult, Logs]]


class CompiledFunctions:
    """Traces what computes on the replicas, once a way of being called, and keeps it.

    Args:
        model: In the strategy's scope.
        strategy: Runs the steps.
        options: How the steps are made.
    """

    def __init__(self, model: keras.Model, strategy: Strategy, options: StepOptions) -> None:
        self._model, self._strategy, self._options = model, strategy, options
        self._compilation: Any = None
        self._steps: dict[tuple[bool, bool, bool], StepsFn] = {}
        # What was trainable when steps were made that have not run yet.
        self._trainable: dict[tuple[bool, bool, bool], list[int]] = {}
        self._outputs = Outputs(model, strategy)
        self._full_batches = FullBatchMode(model, strategy, options.accumulate)
        self._scalings: list[Scaling] = []
        self._accumulations: list[GradientAccumulation] = []
        self._custom_steps = CustomSteps(model, strategy, options)
        if not strategy.has_local_variables:
            read_kernels_outside_of_xla()

    def train(self, feed: DataHandler) -> StepsFn:
        """Returns the inner loop of a training, made anew if the model was compiled anew."""
        return self._inner_loop(feed, True)

    def evaluate(self, feed: DataHandler) -> StepsFn:
        """Returns the inner loop of an evaluation, likewise."""
        return self._inner_loop(feed, False)

    def sync_copies(self) -> None:
        """Lets the steps go on from what the user's code may have made of the model."""
        self._strategy.sync_copies([v for group in self.variables().values() for v in group])

    def variables(self) -> dict[str, list[keras.Variable]]:
        """Returns all variables that steps read and write, by whose they are, each once."""
        model, groups = self._model, dict[str, list[keras.Variable]]()
        if model.compiled:
            groups["metrics"] = model.metrics_variables
        groups["model"] = model.variables
        if model.compiled:
            for number, optimizer in enumerate(optimizers_of(model), 1):
                groups[f"optimizer {number}"] = optimizer.variables
        groups["loss scale"] = [v for scaling in self._scalings for v in scaling.variables]
        groups["steps"] = self._custom_steps.variables
        seen: set[int] = set()
        for name, variables in groups.items():
            own = {id(v): v for v in variables if id(v) not in seen}
            groups[name] = list(own.values())
            seen |= own.keys()
        return groups

    @property
    def accumulation(self) -> GradientAccumulation | None:
        """The gradients that wait on the replicas, of the step that was made last."""
        return self._accumulations[-1] if self._accumulations else None

    def predict(self, feed: DataHandler) -> OutputsFn:
        """Returns the function that computes the outputs for one batch."""
        whole = self._full_batch_reason(feed, training=False) is not None
        self._strategy.place(self._model)
        is_first = not (self._steps or self._outputs.made)
        if is_first and self._model.compiled and self._strategy.stops_together:
            self._strategy.prepare(self._model, optimizers_of(self._model))
        return self._outputs.function(feed, whole)

    def _full_batch_reason(self, feed: DataHandler, training: bool) -> str | None:
        """Builds the model, and returns why each replica is given whole batches, if it is."""
        with policy(self._options.precision):
            build.weights(self._model, self._strategy, feed.element_spec)
        return self._full_batches.for_feed(feed, training)

    def _inner_loop(self, feed: DataHandler, training: bool) -> StepsFn:
        model, strategy = self._model, self._strategy
        if self._compilation is not compile_config(model):
            # A fresh compile() has another optimizer, loss or metrics.
            self._steps.clear()
            self._scalings.clear()
            self._accumulations.clear()
            self._custom_steps.forget()
            create.adopt(model, strategy, self._options.precision, self._options.loss_scale)
            self._compilation = compile_config(model)
        overridden_step = self._custom_steps.step(feed, training)
        if overridden_step is not None and training and self._options.recompute != "none":
            raise ConfigurationError(
                f"recompute={self._options.recompute!r} is for Keras's own step, but "
                f"{type(model).__name__}.train_step has tapes of its own: make its layers in a "
                "keras.RematScope instead."
            )
        reason = self._full_batch_reason(feed, training) if overridden_step is None else None
        key = (training, feed.may_end, feed.own_rows)
        trainable = [id(v) for v in model.trainable_variables]
        if self._trainable.get(key, trainable) != trainable:
            del self._steps[key]  # a callback froze weights before the first step, as Keras allows
        if key not in self._steps:
            if overridden_step is None:
                with policy(self._options.precision):
                    build.for_training(model, strategy, feed.element_spec)
                strategy.prepare(model, optimizers_of(model))
            with strategy.scope():
                step = overridden_step or self._step(feed, training, reason)
            self._trainable[key] = trainable
            run = functools.partial(self._trainable.pop, key, None)
            self._steps[key] = self._traced(step, feed, run)
        return self._steps[key]

    def _step(self, feed: DataHandler, training: bool, full_batch_reason: str | None) -> Step:
        model, options = self._model, self._options
        reductions = ReductionProbe(model, feed.first_batch)
        lookups = Lookups(model, feed.first_batch)
        state = ForwardState(model, reductions, lookups, self._strategy.writes_alone)
        if not training:
            return EvaluateStep(model, self._strategy, state, full_batch_reason)
        scaling = Scaling(model.optimizer, options.loss_scale)
        self._scalings.append(scaling)
        step = TrainStep(
            model, self._strategy, state, scaling,
            options.accumulate, options.sync_batch_norm, full_batch_reason, options.recompute,
        )  # fmt: skip
        if step.accumulation is not None:
            self._accumulations.append(step.accumulation)
        return step

    def _traced(self, step: Step, feed: DataHandler, run: Callable[[], Any]) -> StepsFn:
        """Returns the inner loop of a step, whose errors say what is wrong with the data.

        Args:
            step: To make.
            feed: The data.
            run: Called before each call.
        """
        model, strategy = self._model, self._strategy
        if model.jit_compile and not strategy.has_local_variables:
            warnings.warn(
                "jit_compile=True is left out: XLA cannot read the variables that this strategy "
                "keeps on another device.",
                stacklevel=7,
            )
        steps = strategy.compile(step, model.run_eagerly, feed.may_end, feed.own_rows)

        def call(iterator: Iterator[Any], num_steps: int) -> tuple[LoopResult, Logs]:
            run()
            try:
                with strategy.translate_errors():  # or a lost process would look like bad data
                    made, logs = steps(iterator, tf.constant(num_steps))
            except TfdistError:
                raise
            except tf.errors.ResourceExhaustedError as error:
                raise OutOfMemoryError(build.out_of_memory(error)) from error
            except (ValueError, TypeError, tf.errors.OpError) as error:
                raise DataError(build.describe(model, feed.element_spec, error)) from error
            return LoopResult(*(np.asarray(v).item() for v in made)), _as_floats(logs)

        return call


def _as_floats(logs: Logs) -> Logs:
    """Turns scalars into Python floats; a metric of several numbers stays an array."""
    arrays = {name: np.asarray(value) for name, value in logs.items()}
    return {name: float(a) if a.ndim == 0 else a for name, a in arrays.items()}


def said(reason: str) -> str:
    """Returns what a user is told where whole batches are computed for a reason."""
    return (
        f"{reason}: one replica computes whole batches, to the numbers of one device and no faster."
    )


class FullBatchMode:
    """Finds out once, for training and for the rest, and says so once.

    Args:
        model: Whose.
        strategy: Of its replicas.
        accumulate: Rounds of a training step.
    """

    def __init__(self, model: keras.Model, strategy: Strategy, accumulate: int) -> None:
        self._model, self._strategy, self._accumulate = model, strategy, accumulate
        self._reasons: dict[bool, str | None] = {}

    def for_feed(self, feed: DataHandler, training: bool) -> str | None:
        """Returns why each replica is given the whole batches of a feed, and has it give them.

        Args:
            feed: Before its first epoch; the model is built.
            training: Whether the model is called as in training.
        """
        if training not in self._reasons:
            self._reasons[training] = self._reason(feed, training)
        feed.full_batches = self._reasons[training] is not None
        return self._reasons[training]

    def _reason(self, feed: DataHandler, training: bool) -> str | None:
        if self._strategy.num_replicas * (self._accumulate if training else 1) == 1:
            return None
        try:
            reason = full_batch_reason(self._model, feed.first_batch, training)
        except DataError:
            if not feed.own_rows:  # there other workers may have data
                raise
            reason = None
        told = self._strategy.gather([reason is not None])
        if reason is None and np.any(told):
            reason = "another worker found rows that depend on each other"
        if reason is not None and reason not in self._reasons.values():
            warnings.warn(said(reason), stacklevel=2)
        return reason


class CustomSteps:
    """Makes the steps of a model's own, once for training and once for evaluation.

    Args:
        model: Whose.
        strategy: Of its replicas.
        options: How they are made.
    """

    def __init__(self, model: keras.Model, strategy: Strategy, options: StepOptions) -> None:
        self._model, self._strategy, self._options = model, strategy, options
        self._made: dict[bool, CustomStep] = {}

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables that the steps made so far may change."""
        return [v for step in self._made.values() for v in step.variables]

    def forget(self) -> None:
        """Has all steps made anew, for a model that was compiled anew."""
        self._made.clear()

    def step(self, feed: DataHandler, training: bool) -> CustomStep | None:
        """Returns the step that the model's class overrides, and has a feed give what it needs.

        Args:
            feed: Before its first epoch.
            training: Whether to train, or to evaluate.

        Returns:
            None where Keras's own is meant.

        Raises:
            ConfigurationError: Rounds of a step whose rounds are not known.
            UnsupportedModelError: The step cannot be computed over replicas.
        """
        name = overridden_step(self._model, training)
        if name is None:
            return None
        if training not in self._made:
            self._made[training] = self._make(feed, training, name)
        feed.full_batches = self._made[training].full_batch_reason is not None
        return self._made[training]

    def _make(self, feed: DataHandler, training: bool, name: str) -> CustomStep:
        model, strategy, owner = self._model, self._strategy, type(self._model).__name__
        options = self._options
        if training and options.accumulate > 1:
            raise ConfigurationError(
                f"accumulate={options.accumulate} cuts a step into rounds, but {owner}.{name} is "
                "the whole step: give its optimizers gradient_accumulation_steps instead."
            )
        if compile_config(model).config.get("jit_compile") is True:
            warnings.warn(
                f"jit_compile=True is left out: {owner}.{name} exchanges where its tapes and "
                "optimizers are, and XLA compiles nothing that exchanges.",
                stacklevel=6,
            )
        first_batch = functools.cache(feed.first_batch)
        with policy(options.precision):
            known = trial.build(model, strategy, name, first_batch())
        strategy.prepare(model, optimizers_of(model))
        with strategy.scope():
            step = CustomStep(
                model, known, strategy, training, first_batch,
                options.loss_scale, options.sync_batch_norm,
            )  # fmt: skip
        if step.full_batch_reason:
            reason = f"{owner}.{name} cannot be computed on shares ({step.full_batch_reason})"
            warnings.warn(said(reason), stacklevel=6)
        return step
