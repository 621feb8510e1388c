"""The compiled functions of one model under one strategy, made when the data are first known."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import DataError, TfdistError
from tfdist.loops.epoch import Call
from tfdist.loops.feed import Feed
from tfdist.loops.prediction import Predict
from tfdist.model_setup import create, mismatch
from tfdist.precision import LossScale, Scaling, policy
from tfdist.step.evaluate import EvaluateStep
from tfdist.step.forward_state import ForwardState
from tfdist.step.mean_or_sum import Aggregations
from tfdist.step.train import TrainStep
from tfdist.strategies.base import Strategy
from tfdist.strategies.inner_loop import Made, Step
from tfdist.upstream.keras_model import optimizers_of_one_device


class Engine:
    """Builds model and step, and calls the inner loop.

    Args:
        model: In the strategy's scope.
        strategy: Runs the steps.
        accumulate: Rounds of a training step.
        sync_batch_norm: Whether BatchNorm takes global moments.
        precision: Name of the dtype policy to build with; None: Keras's global one.
        loss_scale: How the loss scale moves; None: as the optimizer says.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: Strategy,
        accumulate: int,
        sync_batch_norm: bool,
        precision: str | None,
        loss_scale: LossScale | None,
    ) -> None:
        self._model, self._strategy = model, strategy
        self._accumulate, self._sync_batch_norm = accumulate, sync_batch_norm
        self._precision, self._loss_scale = precision, loss_scale
        self._compiled_with: Any = None
        self._calls: dict[tuple[bool, bool, bool], Call] = {}
        self._predict: Any = None

    def train(self, feed: Feed) -> Call:
        """Returns the training loop, compiled anew if the model was."""
        return self._call(feed, True)

    def test(self, feed: Feed) -> Call:
        """Returns the evaluation loop."""
        return self._call(feed, False)

    def predict(self, feed: Feed) -> Predict:
        """Returns the function that computes the outputs of one batch."""
        model, strategy = self._model, self._strategy
        with policy(self._precision):
            create.build_weights(model, strategy, feed.element_spec)

        def outputs(iterator: Any) -> list[Any]:
            return strategy.outputs(model.predict_step, strategy.unpack(next(iterator)))

        if not model.run_eagerly:
            self._predict = self._predict or tf.function(
                outputs, reduce_retracing=True, autograph=False
            )
            outputs = self._predict

        def call(iterator: Iterator[Any]) -> list[Any] | None:
            try:
                return outputs(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                return None

        return call

    def finalize(self) -> None:
        """Ends training: where the optimizer averages weights (EMA), the model gets them."""
        optimizer, weights = self._model.optimizer, self._model.trainable_variables
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if not inner.use_ema:
            return

        def on_copy(_: Any) -> None:
            with optimizers_of_one_device():
                inner.finalize_variable_values(weights)

        self._strategy.update(on_copy, self._strategy.run(lambda i: tf.constant(0)))

    def _call(self, feed: Feed, training: bool) -> Call:
        model = self._model
        if self._compiled_with is not model._compile_config:
            # A fresh compile() has another optimizer, loss or metrics.
            self._calls.clear()
            create.adopt(model, self._strategy, self._precision, self._loss_scale)
            self._compiled_with = model._compile_config
        key = (training, feed.may_end, feed.own_rows)
        if key not in self._calls:
            with policy(self._precision):
                create.build(model, self._strategy, feed.element_spec)
            self._strategy.prepare(model, model.optimizer)
            with self._strategy.scope():
                step = self._step(feed, training)
            self._calls[key] = self._in_one_call(step, feed)
        return self._calls[key]

    def _step(self, feed: Feed, training: bool) -> Step:
        model = self._model
        aggregations = Aggregations(model, feed.first_batch)
        state = ForwardState(model, aggregations, self._strategy.writes_alone)
        if not training:
            return EvaluateStep(model, self._strategy, state)
        scaling = Scaling(model.optimizer, self._loss_scale)
        return TrainStep(
            model, self._strategy, state, scaling, self._accumulate, self._sync_batch_norm
        )

    def _in_one_call(self, step: Step, feed: Feed) -> Call:
        if self._model.jit_compile and not self._strategy.has_local_variables:
            warnings.warn(
                f"jit_compile=True is left out: XLA cannot read the variables that strategy "
                f"{self._strategy.name!r} keeps on another device.",
                stacklevel=5,
            )
        steps = self._strategy.compile(step, self._model.run_eagerly, feed.may_end, feed.own_rows)

        def call(iterator: Iterator[Any], num_steps: int) -> tuple[Made, dict[str, float]]:
            try:
                with self._strategy.explaining():  # or a lost process would look like bad data
                    made, logs = steps(iterator, tf.constant(num_steps))
            except TfdistError:
                raise
            except (ValueError, TypeError, tf.errors.OpError) as error:
                raise DataError(mismatch.describe(self._model, feed.element_spec, error)) from error
            return Made(*(np.asarray(v).item() for v in made)), _as_floats(logs)

        return call


def _as_floats(logs: dict[str, Any]) -> dict[str, Any]:
    """Turns scalars into Python floats; a metric of several numbers stays an array."""
    arrays = {name: np.asarray(value) for name, value in logs.items()}
    return {name: float(a) if a.ndim == 0 else a for name, a in arrays.items()}
