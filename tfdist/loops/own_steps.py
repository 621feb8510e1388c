"""The steps that a model's class overrides, each made when its first batch is known."""

from __future__ import annotations

import functools
import warnings

import keras

from tfdist.errors import ConfigurationError
from tfdist.loops.feed import Feed
from tfdist.loops.step_options import StepOptions
from tfdist.loops.whole_batches import said
from tfdist.precision import policy
from tfdist.step.own import trial
from tfdist.step.own.step import OwnStep, own_step
from tfdist.strategies.base import Strategy
from tfdist.upstream.keras_model import compile_config
from tfdist.upstream.keras_optimizers import optimizers_of


class OwnSteps:
    """Makes the steps of a model's own, once for training and once for evaluation.

    Args:
        model: Whose.
        strategy: Of its replicas.
        options: How they are made.
    """

    def __init__(self, model: keras.Model, strategy: Strategy, options: StepOptions) -> None:
        self._model, self._strategy, self._options = model, strategy, options
        self._made: dict[bool, OwnStep] = {}

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables that the steps made so far may change."""
        return [v for step in self._made.values() for v in step.variables]

    def forget(self) -> None:
        """Has all steps made anew, for a model that was compiled anew."""
        self._made.clear()

    def step(self, feed: Feed, training: bool) -> OwnStep | None:
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
        name = own_step(self._model, training)
        if name is None:
            return None
        if training not in self._made:
            self._made[training] = self._make(feed, training, name)
        feed.whole_batches = self._made[training].why_whole is not None
        return self._made[training]

    def _make(self, feed: Feed, training: bool, name: str) -> OwnStep:
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
            step = OwnStep(
                model, known, strategy, training, first_batch,
                options.loss_scale, options.sync_batch_norm,
            )  # fmt: skip
        if step.why_whole:
            reason = f"{owner}.{name} cannot be computed on shares ({step.why_whole})"
            warnings.warn(said(reason), stacklevel=6)
        return step
