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
    """The initial loss scale, and how it changes.

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
        growth_factor: Factor after `growth_interval` finite steps; 1 for no growth.
        backoff_factor: Factor after an overflow; 1 for no change.
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
        """Returns a constant loss scale. Steps that overflow are still skipped.

        Example:
            >>> LossScale.fixed(128.0).growth_factor
            1.0
        """
        return cls(initial=scale, growth_factor=1.0, backoff_factor=1.0)


class Scaling:
    """Scales the loss and unscales gradients of one model. Does nothing without a loss scale.

    The state is in the model's `keras.optimizers.LossScaleOptimizer`, so that it is saved
    with the model and loads in plain Keras.

    Args:
        optimizer: The compiled optimizer: a `LossScaleOptimizer`, or any other.
        rule: How the scale changes; None: as configured in the `LossScaleOptimizer`.

    Attributes:
        variables: Variables in addition to those of the optimizer.
        skipped: Number of skipped steps, if the loss is scaled.
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
        """Scales a replica's part of the loss before its gradients are computed."""
        return loss * self._state.dynamic_scale if self.active else self.optimizer.scale_loss(loss)

    def unscale(self, gradients: list) -> list:
        """Divides gradients by the loss scale."""
        if not self.active:
            return gradients
        scale = tf.convert_to_tensor(self._state.dynamic_scale)
        return [g if g is None else keras.ops.divide(g, tf.cast(scale, g.dtype)) for g in gradients]

    def overflows(self, gradients: list) -> tf.Tensor:
        """Returns the number of gradients that are not finite, int32; 0 without a loss scale."""
        if not self.active:
            return tf.constant(0)
        values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        finite = [tf.reduce_all(tf.math.is_finite(v)) for v in values if v is not None]
        if not finite:
            return tf.constant(0)
        # Stacked before they are counted: GPUs leave sums of int32 to the host.
        return tf.math.count_nonzero(~tf.stack(finite), dtype=tf.int32)

    def apply(
        self,
        gradients: list,
        commit: Callable[[list], None],
        any_of_shards: Callable[[tf.Tensor], tf.Tensor],
    ) -> None:
        """Unscales reduced gradients, and commits the step if they are finite.

        Args:
            gradients: Tensors, `tf.IndexedSlices` or None, the same on every replica, or shards.
            commit: Applies unscaled gradients and all other changes of the step.
            any_of_shards: See `Strategy.any_of_parts`.
        """
        if not self.active:
            commit(gradients)
            return
        unscaled = self.unscale(gradients)
        finite = ~any_of_shards(self.overflows(unscaled) > 0)

        def apply_step() -> tf.Tensor:
            commit(unscaled)
            return tf.constant(True)

        tf.cond(finite, apply_step, lambda: tf.constant(False))
        self.update(finite)

    def update(self, finite: tf.Tensor) -> None:
        """Updates the scale, and counts skipped steps."""
        rule, state = self._rule, self._state
        counter = tf.convert_to_tensor(state.step_counter)
        grows = finite & (counter >= rule.growth_interval - 1)
        factor = tf.where(grows, rule.growth_factor, tf.where(finite, 1.0, rule.backoff_factor))
        state.dynamic_scale.assign(state.dynamic_scale * factor)
        state.step_counter.assign(tf.where(finite & ~grows, counter + 1, 0))
        self.skipped.assign_add(tf.cast(~finite, "int64"))

    def logs(self) -> dict[str, tf.Tensor]:
        """Returns the scale and the number of skipped steps so far."""
        if not self.active:
            return {}
        return {
            "loss_scale": tf.convert_to_tensor(self._state.dynamic_scale),
            "skipped_steps": tf.convert_to_tensor(self.skipped),
        }


def with_loss_scale(model: keras.Model, rule: LossScale | None, named: str | None) -> None:
    """Wraps the optimizer of a compiled model in a `LossScaleOptimizer`, if requested.

    Args:
        model: A compiled model.
        rule: The requested loss scale; None: dynamic for the float16 policies, otherwise none.
        named: The name of the requested precision.

    Raises:
        ConfigurationError: The scale is not a `LossScale`, or the model class overrides `compile`.
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
            f"{type(model).__name__} overrides compile, so its optimizers cannot be wrapped for "
            "loss scaling. Wrap them in keras.optimizers.LossScaleOptimizer."
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
            f"loss_scale={rule!r}: expected a LossScale, such as LossScale.fixed(128.0), or None."
        )
