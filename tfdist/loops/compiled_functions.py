"""The compiled functions of one model under one strategy, made when the data are first known."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import ConfigurationError, DataError, OutOfMemoryError, TfdistError
from tfdist.loops.feed import Feed
from tfdist.loops.outputs import Outputs, OutputsFn
from tfdist.loops.own_steps import OwnSteps
from tfdist.loops.step_options import StepOptions
from tfdist.loops.whole_batches import WholeBatches
from tfdist.model_setup import build, create, mismatch
from tfdist.precision import Scaling, policy
from tfdist.step.evaluate import EvaluateStep
from tfdist.step.forward_state import ForwardState
from tfdist.step.gradient_accumulation import GradientAccumulation
from tfdist.step.mean_or_sum import Aggregations
from tfdist.step.train import TrainStep
from tfdist.strategies.base import Strategy
from tfdist.strategies.inner_loop import Logs, Made, Step
from tfdist.upstream.keras_layers import read_kernels_outside_of_xla
from tfdist.upstream.keras_model import compile_config
from tfdist.upstream.keras_optimizers import optimizers_of

#: Makes up to that many steps, each on a batch of the iterator: what was done, and the logs after.
StepsFn = Callable[[Iterator[Any], int], tuple[Made, Logs]]


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
        self._whole_batches = WholeBatches(model, strategy, options.accumulate)
        self._scalings: list[Scaling] = []
        self._accumulations: list[GradientAccumulation] = []
        self._own_steps = OwnSteps(model, strategy, options)
        if not strategy.has_local_variables:
            read_kernels_outside_of_xla()

    def train(self, feed: Feed) -> StepsFn:
        """Returns the inner loop of a training, made anew if the model was compiled anew."""
        return self._inner_loop(feed, True)

    def evaluate(self, feed: Feed) -> StepsFn:
        """Returns the inner loop of an evaluation, likewise."""
        return self._inner_loop(feed, False)

    def take_over(self) -> None:
        """Lets the steps go on from what the user's code may have made of the model."""
        self._strategy.take_over([v for group in self.variables().values() for v in group])

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
        groups["steps"] = self._own_steps.variables
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

    def predict(self, feed: Feed) -> OutputsFn:
        """Returns the function that computes the outputs for one batch."""
        whole = self._why_whole(feed, training=False) is not None
        self._strategy.place(self._model)
        is_first = not (self._steps or self._outputs.made)
        if is_first and self._model.compiled and self._strategy.stops_together:
            self._strategy.prepare(self._model, optimizers_of(self._model))
        return self._outputs.function(feed, whole)

    def _why_whole(self, feed: Feed, training: bool) -> str | None:
        """Builds the model, and returns why each replica is given whole batches, if it is."""
        with policy(self._options.precision):
            build.weights(self._model, self._strategy, feed.element_spec)
        return self._whole_batches.for_feed(feed, training)

    def _inner_loop(self, feed: Feed, training: bool) -> StepsFn:
        model, strategy = self._model, self._strategy
        if self._compilation is not compile_config(model):
            # A fresh compile() has another optimizer, loss or metrics.
            self._steps.clear()
            self._scalings.clear()
            self._accumulations.clear()
            self._own_steps.forget()
            create.adopt(model, strategy, self._options.precision, self._options.loss_scale)
            self._compilation = compile_config(model)
        own_step = self._own_steps.step(feed, training)
        if own_step is not None and training and self._options.recompute != "none":
            raise ConfigurationError(
                f"recompute={self._options.recompute!r} is for Keras's own step, but "
                f"{type(model).__name__}.train_step has tapes of its own: make its layers in a "
                "keras.RematScope instead."
            )
        why_whole = self._why_whole(feed, training) if own_step is None else None
        key = (training, feed.may_end, feed.own_rows)
        trainable = [id(v) for v in model.trainable_variables]
        if self._trainable.get(key, trainable) != trainable:
            del self._steps[key]  # a callback froze weights before the first step, as Keras allows
        if key not in self._steps:
            if own_step is None:
                with policy(self._options.precision):
                    build.for_training(model, strategy, feed.element_spec)
                strategy.prepare(model, optimizers_of(model))
            with strategy.scope():
                step = own_step or self._step(feed, training, why_whole)
            self._trainable[key] = trainable
            run = functools.partial(self._trainable.pop, key, None)
            self._steps[key] = self._traced(step, feed, run)
        return self._steps[key]

    def _step(self, feed: Feed, training: bool, why_whole: str | None) -> Step:
        model, options = self._model, self._options
        aggregations = Aggregations(model, feed.first_batch)
        state = ForwardState(model, aggregations, self._strategy.writes_alone)
        if not training:
            return EvaluateStep(model, self._strategy, state, why_whole)
        scaling = Scaling(model.optimizer, options.loss_scale)
        self._scalings.append(scaling)
        step = TrainStep(
            model, self._strategy, state, scaling,
            options.accumulate, options.sync_batch_norm, why_whole, options.recompute,
        )  # fmt: skip
        if step.accumulation is not None:
            self._accumulations.append(step.accumulation)
        return step

    def _traced(self, step: Step, feed: Feed, run: Callable[[], Any]) -> StepsFn:
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

        def call(iterator: Iterator[Any], num_steps: int) -> tuple[Made, Logs]:
            run()
            try:
                with strategy.explaining():  # or a lost process would look like bad data
                    made, logs = steps(iterator, tf.constant(num_steps))
            except TfdistError:
                raise
            except tf.errors.ResourceExhaustedError as error:
                raise OutOfMemoryError(mismatch.out_of_memory(error)) from error
            except (ValueError, TypeError, tf.errors.OpError) as error:
                raise DataError(mismatch.describe(model, feed.element_spec, error)) from error
            return Made(*(np.asarray(v).item() for v in made)), _as_floats(logs)

        return call


def _as_floats(logs: Logs) -> Logs:
    """Turns scalars into Python floats; a metric of several numbers stays an array."""
    arrays = {name: np.asarray(value) for name, value in logs.items()}
    return {name: float(a) if a.ndim == 0 else a for name, a in arrays.items()}
