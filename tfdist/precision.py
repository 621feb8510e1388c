"""Mixed precision: dtype policies for one model, and loss scaling.

The loss is scaled before the gradients are computed, so that small float16 gradients do not
underflow. After the all-reduce, the gradients are unscaled and checked once for all replicas. If
they are not finite, the step is skipped (Micikevicius et al. 2018, "Mixed Precision Training").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import keras
import tensorflow as tf

from tfdist.errors import ConfigurationError
from tfdist.upstream.keras_model import compile_config

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16", "float16", "bfloat16")


@contextmanager
def policy(name: str | None) -> Iterator[None]:
    """Context manager that sets Keras's global dtype policy within the block.

    Example:
        >>> from tfdist import precision
        >>> with precision.policy("mixed_bfloat16"):
        ...     layer = keras.layers.Dense(10)
        >>> layer.compute_dtype, keras.config.dtype_policy().name
        ('bfloat16', 'float32')

    Args:
        name: One of `POLICIES`; None leaves the policy unchanged.

    Raises:
        ConfigurationError: The policy is not one of `POLICIES`.
    """
    if name is None:
        yield
        return
    if name not in POLICIES:
        raise ConfigurationError(f"precision={name!r}: expected one of {', '.join(POLICIES)}.")
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


@dataclass(frozen=True)
class LossScale:
    """How the loss scale starts and how it changes.

    Example:
        >>> from tfdist.precision import LossScale
        >>> trainer = tfdist.Trainer(
        ...     build_model, devices=2, precision="mixed_float16", loss_scale=LossScale(1024.0)
        ... )
        >>> history = trainer.fit(x, y, batch_size=64, verbose=0)
        >>> sorted(history.history)
        ['accuracy', 'loss', 'loss_scale', 'skipped_steps']

    Attributes:
        initial: The scale at the first step.
        growth_interval: Number of consecutive finite steps after which the scale grows.
        growth_factor: The factor by which it grows; 1 keeps it.
        backoff_factor: The factor by which it is multiplied after an overflow; 1 keeps it.
    """

    initial: float = 2.0**15
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5

    def __post_init__(self) -> None:
        if not (self.initial > 0 and self.growth_factor >= 1 >= self.backoff_factor > 0):
            raise ConfigurationError(
                f"{self}: expected initial > 0, growth_factor >= 1 and 0 < backoff_factor <= 1."
            )
        if self.growth_interval < 1:
            raise ConfigurationError(f"growth_interval={self.growth_interval}: expected >= 1.")

    @classmethod
    def fixed(cls, scale: float) -> LossScale:
        """Returns a constant loss scale. Steps that overflow are skipped nevertheless.

        Example:
            >>> LossScale.fixed(128.0).growth_factor
            1.0
        """
        return cls(initial=scale, growth_factor=1.0, backoff_factor=1.0)


class Scaling:
    """The loss scale of one model at work; without one, everything passes through.

    The state lives in the model's own `keras.optimizers.LossScaleOptimizer`, so that it is saved
    with the model and loads in plain Keras.

    Args:
        optimizer: As compiled: a `LossScaleOptimizer`, or any other.
        rule: How the scale moves; None: as the `LossScaleOptimizer` says.

    Attributes:
        variables: What it counts besides the state of the optimizer.
        skipped: How many steps were left out, if the loss is scaled.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, rule: LossScale | None) -> None:
        self.active = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        self.optimizer = optimizer.inner_optimizer if self.active else optimizer
        self.variables: list[keras.Variable] = []
        if self.active:
            self._state = optimizer
            self._rule = rule or LossScale(optimizer.initial_scale, optimizer.dynamic_growth_steps)
            self.skipped = keras.Variable(0, dtype="int64", trainable=False, name="skipped_steps")
            self.variables.append(self.skipped)

    def scale(self, loss: tf.Tensor) -> tf.Tensor:
        """Scales the loss of a share before its gradients are taken."""
        return loss * self._state.dynamic_scale if self.active else self.optimizer.scale_loss(loss)

    def unscale(self, gradients: list) -> list:
        """Divides gradients by the scale of the loss they were taken from."""
        if not self.active:
            return gradients
        scale = tf.convert_to_tensor(self._state.dynamic_scale)
        return [g if g is None else keras.ops.divide(g, tf.cast(scale, g.dtype)) for g in gradients]

    def overflows(self, gradients: list) -> tf.Tensor:
        """Returns how many gradients are not finite, int32; 0 where no loss is scaled."""
        if not self.active:
            return tf.constant(0)
        values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        finite = [tf.reduce_all(tf.math.is_finite(v)) for v in values if v is not None]
        return tf.add_n([tf.constant(0), *(tf.cast(~f, tf.int32) for f in finite)])

    def apply(
        self,
        gradients: list,
        commit: Callable[[list], None],
        anywhere: Callable[[tf.Tensor], tf.Tensor],
    ) -> None:
        """Unscales summed gradients and commits the step if they are finite.

        Args:
            gradients: Tensors, `tf.IndexedSlices` or None, the same on every replica, or parts.
            commit: Applies unscaled gradients, and all else that the step changes.
            anywhere: As `Strategy.any_of_parts`.
        """
        if not self.active:
            commit(gradients)
            return
        unscaled = self.unscale(gradients)
        finite = ~anywhere(self.overflows(unscaled) > 0)

        def made() -> tf.Tensor:
            commit(unscaled)
            return tf.constant(True)

        tf.cond(finite, made, lambda: tf.constant(False))
        self.move(finite)

    def move(self, finite: tf.Tensor) -> None:
        """Moves the scale, and counts the step if it was left out."""
        rule, state = self._rule, self._state
        counter = tf.convert_to_tensor(state.step_counter)
        grows = finite & (counter >= rule.growth_interval - 1)
        factor = tf.where(grows, rule.growth_factor, tf.where(finite, 1.0, rule.backoff_factor))
        state.dynamic_scale.assign(state.dynamic_scale * factor)
        state.step_counter.assign(tf.where(finite & ~grows, counter + 1, 0))
        self.skipped.assign_add(tf.cast(~finite, "int64"))

    def logs(self) -> dict[str, tf.Tensor]:
        """Returns the scale, and the steps that were left out so far."""
        if not self.active:
            return {}
        return {
            "loss_scale": tf.convert_to_tensor(self._state.dynamic_scale),
            "skipped_steps": tf.convert_to_tensor(self.skipped),
        }


def with_loss_scale(model: keras.Model, rule: LossScale | None, named: str | None) -> None:
    """Puts a `LossScaleOptimizer` around a compiled model's optimizer where one is wanted.

    Args:
        model: A compiled model.
        rule: The scale asked for; None: dynamic for the float16 policies, else none.
        named: The precision asked for by name.

    Raises:
        ConfigurationError: The scale is no `LossScale`, or the model's class compiles itself.
    """
    _check(rule)
    optimizer = model.optimizer
    wrapped = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if wrapped and rule is not None:
        optimizer.initial_scale = rule.initial
        optimizer.dynamic_growth_steps = rule.growth_interval
        if optimizer.built:
            optimizer.dynamic_scale.assign(rule.initial)
    if wrapped or (rule is None and named != "float16"):
        return
    if type(model).compile is not keras.Model.compile:
        raise ConfigurationError(
            f"{type(model).__name__} has a compile of its own, so its loss is not scaled from "
            "outside: put keras.optimizers.LossScaleOptimizer around its optimizers."
        )
    rule = rule or LossScale()
    config = dict(compile_config(model).config)
    config["optimizer"] = keras.optimizers.LossScaleOptimizer(
        optimizer, initial_scale=rule.initial, dynamic_growth_steps=rule.growth_interval
    )
    model.compile(**config)


def _check(rule: object) -> None:
    if rule is not None and not isinstance(rule, LossScale):
        raise ConfigurationError(
            f"loss_scale={rule!r}: expected a LossScale, say LossScale.fixed(128.0), or None."
        )
