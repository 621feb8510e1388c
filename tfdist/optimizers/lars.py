"""Layer-wise adaptive rate scaling (LARS)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from tfdist.optimizers.momentum_sgd import MomentumSGD, dense
from tfdist.optimizers.weight_decay import NOT_DECAYED
from tfdist.upstream import keras_optimizers


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
            rate = ops.multiply(rate, self._ratio(gradient, variable))
        gradient = self._decayed(gradient, variable, index)
        velocity = self.velocities[index]
        momentum = ops.cast(self.momentum, dtype)
        step = ops.add(ops.multiply(velocity, momentum), ops.multiply(gradient, rate))
        self.assign(velocity, step)
        self.assign_sub(variable, step)

    def _ratio(self, gradient: Any, variable: Any) -> Any:
        """Returns q, a scalar of the weight's dtype."""
        weight_norm, gradient_norm = _norm(variable), _norm(gradient)
        nonzero = ops.logical_and(weight_norm > 0, gradient_norm > 0)
        divisor = ops.where(nonzero, gradient_norm + self.decay * weight_norm, 1.0)
        ratio = ops.where(nonzero, self.trust * weight_norm / divisor, 1.0)
        return ops.cast(ratio, variable.dtype)

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
