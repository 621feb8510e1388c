"""Momentum correction, and layer-wise adaptive rate scaling (LARS)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfdist.errors import ConfigurationError
from tfdist.upstream import keras_optimizers

#: Parts of the names that Keras's layers give to these weights.
NOT_DECAYED = ("bias", "gamma", "beta")


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


@keras.saving.register_keras_serializable(package="tfdist.optimizers")
class LARS(MomentumSGD):
    """Layer-wise adaptive rate scaling (LARS): SGD with a learning rate for each weight.

    For a weight w with gradient g, trust t, decay d, momentum m and learning rate r::

        q = t |w| / (|g| + d |w|)
        v <- m v + r q (g + d w)
        w <- w - v

    Example:
        >>> rate = schedules.polynomial(10.0, total_steps=4500, warmup_steps=250)
        >>> optimizer = optimizers.LARS(rate, momentum=0.9, weight_decay=5e-5)
        >>> optimizer.trust
        0.001

    Source: You, Gitman and Ginsburg 2017, "Large Batch Training of Convolutional Networks",
    algorithm 1 and equation 6. If the weight or the gradient has norm 0, q is 1, so that weights
    that start at zero can change. Excluded weights (biases, normalization) use q = 1 and d = 0, as
    in MLPerf's ResNet-50. Each variable counts as a layer. Norms are those of the gradient of the
    global batch. The gradient of an embedding is converted to a dense tensor.

    Args:
        learning_rate: The global rate r; a float or a Keras schedule.
        momentum: m, in [0, 1).
        weight_decay: d; None: 0.
        trust: t, the paper's eta.
        exclude: Weights whose name contains one of these words are excluded.
        **options: Options of every Keras optimizer, such as `clipnorm` and `use_ema`.

    Raises:
        ConfigurationError: The momentum or the decay is out of range.
    """

    def __init__(
        self,
        learning_rate: Any = 1.0,
        momentum: float = 0.9,
        weight_decay: float | None = None,
        trust: float = 0.001,
        exclude: Sequence[str] = NOT_DECAYED,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, momentum, False, weight_decay, exclude, **options)
        self.trust = trust

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates one weight with its gradient, which may be `tf.IndexedSlices`."""
        dtype, index = variable.dtype, keras_optimizers.index_of(self, variable)
        gradient, rate = dense(gradient, dtype), ops.cast(learning_rate, dtype)
        if self._decays[index]:
            # The trust ratio, a scalar of the weight's dtype.
            weight_norm, gradient_norm = _norm(variable), _norm(gradient)
            nonzero = ops.logical_and(weight_norm > 0, gradient_norm > 0)
            divisor = ops.where(nonzero, gradient_norm + self.decay * weight_norm, 1.0)
            ratio = ops.where(nonzero, self.trust * weight_norm / divisor, 1.0)
            rate = ops.multiply(rate, ops.cast(ratio, variable.dtype))
        gradient = self._decayed(gradient, variable, index)
        velocity = self.velocities[index]
        momentum = ops.cast(self.momentum, dtype)
        step = ops.add(ops.multiply(velocity, momentum), ops.multiply(gradient, rate))
        self.assign(velocity, step)
        self.assign_sub(variable, step)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of this optimizer, as Keras saves them."""
        config = super().get_config() | {"trust": self.trust}
        del config["nesterov"]
        return config


def _norm(tensor: Any) -> Any:
    """Returns the Euclidean norm; float16 and bfloat16 are summed in float32 to avoid overflow."""
    tensor = ops.convert_to_tensor(tensor)
    if keras.backend.standardize_dtype(tensor.dtype) in ("float16", "bfloat16"):
        tensor = ops.cast(tensor, "float32")
    return ops.sqrt(ops.sum(ops.square(tensor)))


def leave_biases_and_norms(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Excludes biases, and the scale and offset of normalization layers, from weight decay.

    Example:
        >>> optimizer = keras.optimizers.AdamW(1e-3, weight_decay=0.01)
        >>> optimizers.leave_biases_and_norms(optimizer) is optimizer
        True

    Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 5.1 ("We do not apply weight
    decay on the learnable BN coefficients"); He et al. 2019, "Bag of Tricks for Image
    Classification with Convolutional Neural Networks", section 3.1 (for biases).

    Args:
        optimizer: A Keras optimizer that is not built yet. `LARS` and `MomentumSGD` exclude these
            weights by default.

    Returns:
        The same optimizer.
    """
    optimizer.exclude_from_weight_decay(var_names=list(NOT_DECAYED))
    return optimizer
