"""A linear warm-up before any learning-rate schedule."""

from __future__ import annotations

from typing import Any, TypeAlias

import keras
import tensorflow as tf

Schedule: TypeAlias = keras.optimizers.schedules.LearningRateSchedule


@keras.saving.register_keras_serializable(package="tfdist.schedules")
class Warmup(Schedule):
    """A linear warm-up from `start` to the first rate of another schedule, which follows it.

    At step i of W, the rate is `start + (then(0) - start) * i / W`; from step W on it is
    `then(i - W)`. The rate thus rises in equal increments and reaches its peak after W steps.

    Example:
        >>> decay = keras.optimizers.schedules.ExponentialDecay(0.1, 100, 0.5)
        >>> rate = schedules.Warmup(decay, warmup_steps=10)
        >>> [round(float(rate(step)), 3) for step in (0, 5, 10, 110)]
        [0.0, 0.05, 0.1, 0.05]

    Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.2, where `start` is the
    rate for the reference batch.

    Args:
        then: The schedule after the warm-up.
        warmup_steps: Length of the warm-up in optimizer steps, at least 1.
        start: The rate at step 0.
    """

    def __init__(self, then: Schedule, warmup_steps: int, start: float = 0.0) -> None:
        super().__init__()
        self.then, self.warmup_steps, self.start = then, warmup_steps, start

    def __call__(self, step: Any) -> tf.Tensor:
        """Returns the learning rate at an optimizer step (from 0), a float32 scalar."""
        done = tf.cast(tf.convert_to_tensor(step), tf.float32)
        steps = tf.constant(self.warmup_steps, tf.float32)
        peak = tf.cast(self.then(tf.constant(0.0)), tf.float32)
        rising = self.start + (peak - self.start) * tf.minimum(done / steps, 1.0)
        after = tf.cast(self.then(tf.maximum(done - steps, 0.0)), tf.float32)
        return tf.where(done < steps, rising, after)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of this schedule, as Keras saves them."""
        return {
            "then": keras.optimizers.schedules.serialize(self.then),
            "warmup_steps": self.warmup_steps,
            "start": self.start,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Warmup:
        """Creates a schedule from the arguments that `get_config` returned."""
        then = keras.optimizers.schedules.deserialize(config["then"])
        return cls(**{**config, "then": then})
