"""Mixed precision: dtype policies for one model, and the loss scale of its optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import keras

from tfdist.errors import ConfigurationError
from tfdist.upstream.keras_model import compile_config, overrides

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


def with_loss_scale(model: keras.Model, rule: LossScale | None, named: str | None) -> None:
    """Wraps the optimizer of a compiled model in a `LossScaleOptimizer`, if requested.

    Args:
        model: A compiled model.
        rule: The requested loss scale; None: dynamic for the float16 policies, otherwise none.
        named: The name of the requested precision.

    Raises:
        ConfigurationError: The scale is not a `LossScale`, or the model class overrides `compile`.
    """
    if rule is not None and not isinstance(rule, LossScale):
        raise ConfigurationError(
            f"loss_scale={rule!r}: expected a LossScale, such as LossScale.fixed(128.0), or None."
        )
    optimizer = model.optimizer
    wrapped = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if wrapped and rule is not None:
        optimizer.initial_scale = rule.initial
        optimizer.dynamic_growth_steps = rule.growth_interval
        if optimizer.built:
            optimizer.dynamic_scale.assign(rule.initial)
    if wrapped or (rule is None and named != "float16"):
        return
    if overrides(model, "compile"):
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
