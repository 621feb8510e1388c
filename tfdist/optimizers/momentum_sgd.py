"""Gradient descent whose velocity does not contain the learning rate (momentum correction)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfdist.errors import ConfigurationError
from tfdist.optimizers.weight_decay import NOT_DECAYED
from tfdist.upstream import keras_optimizers


@keras.saving.register_keras_serializable(package="tfdist.optimizers")
class MomentumSGD(keras.optimizers.Optimizer):
    """SGD with momentum correction, and with weight decay as the gradient of an L2 penalty.

    The update is `u <- m u + g + d w`, then `w <- w - r u`, with learning rate r, momentum m and
    decay d. Keras's SGD stores `r u` instead, so that steps after a change of the learning rate
    still use the previous rate (Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 3,
    remark 2; equation 9 is the form used here). At a constant rate without decay, both are the
    same. Keras's `weight_decay` is decoupled from the gradient. Here it is the gradient of
    `d/2 |w|^2` and passes through the momentum, as in that paper. The penalty is not part of the
    reported loss.

    Example:
        >>> optimizer = optimizers.MomentumSGD(0.1, momentum=0.9, weight_decay=1e-4)
        >>> model = build_model()
        >>> model.compile(optimizer, "sparse_categorical_crossentropy")
        >>> optimizer.exclude
        ('bias', 'gamma', 'beta')

    Args:
        learning_rate: A float or a Keras schedule.
        momentum: m, in [0, 1).
        nesterov: Whether to use Nesterov momentum: `w <- w - r (m u + g + d w)` with the new u.
        weight_decay: d; None: 0.
        exclude: Weights whose name contains one of these words do not decay.
        **options: Options of every Keras optimizer, such as `clipnorm` and `use_ema`.

    Raises:
        ConfigurationError: The momentum or the decay is out of range.
    """

    def __init__(
        self,
        learning_rate: Any = 0.01,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float | None = None,
        exclude: Sequence[str] = NOT_DECAYED,
        **options: Any,
    ) -> None:
        # `weight_decay` is not passed on: Keras's is decoupled from the gradient.
        super().__init__(learning_rate=learning_rate, **options)
        if not 0 <= momentum < 1 or (weight_decay or 0) < 0:
            raise ConfigurationError(
                f"{type(self).__name__}: expected a momentum from 0 to below 1 and a weight decay "
                f"of at least 0, got {momentum} and {weight_decay}."
            )
        self.momentum, self.nesterov = momentum, nesterov
        self.decay, self.exclude = weight_decay or 0.0, tuple(exclude)
        self.exclude_from_weight_decay(var_names=list(exclude))

    def build(self, variables: list[keras.Variable]) -> None:
        """Creates a velocity for each weight, with its shape and dtype."""
        if self.built:
            return
        super().build(variables)
        self.velocities = [self.add_variable_from_reference(v, name="velocity") for v in variables]
        self._decays = [keras_optimizers.decays(self, v) for v in variables]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates one weight with its gradient, which may be `tf.IndexedSlices`."""
        rate = ops.cast(learning_rate, variable.dtype)
        index = keras_optimizers.index_of(self, variable)
        gradient = self._decayed(dense(gradient, variable.dtype), variable, index)
        momentum = ops.cast(self.momentum, variable.dtype)
        velocity = self.velocities[index]
        new = ops.add(ops.multiply(velocity, momentum), gradient)
        self.assign(velocity, new)
        step = ops.add(ops.multiply(new, momentum), gradient) if self.nesterov else new
        self.assign_sub(variable, ops.multiply(step, rate))

    def _decayed(self, gradient: Any, variable: Any, index: int) -> Any:
        """Returns the gradient plus the gradient of the penalty."""
        if not (self.decay and self._decays[index]):
            return gradient
        return ops.add(gradient, ops.multiply(variable, ops.cast(self.decay, variable.dtype)))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of this optimizer, as Keras saves them."""
        return super().get_config() | {
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "weight_decay": self.decay,
            "exclude": list(self.exclude),
        }


def dense(gradient: Any, dtype: Any) -> Any:
    """Returns a gradient as a dense tensor, because momentum and decay update every row anyway."""
    return ops.cast(tf.convert_to_tensor(gradient), dtype)
