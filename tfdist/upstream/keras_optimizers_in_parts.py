"""Private names of Keras's optimizers, where what they change is kept in parts.

Each function stands for one of Keras's and calls it: once for each part of a variable, on the
part's device. That is what the whole comes to where an optimizer computes each element by itself;
norms, of which clipping knows two, are of all parts together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer

from tfdist.upstream.keras_variables import ShardedGradient, ShardedVariable, part
from tfdist.upstream.patching import replaced

_AVERAGES = "_model_variables_moving_average"
_plain_key = TFOptimizer.__dict__["_var_key"]
_plain_clip = BaseOptimizer.__dict__["_clip_gradients"]


def methods() -> dict[str, Callable[..., Any]]:
    """Returns what stands for methods of `TFOptimizer`, by their names."""
    one_by_one = (
        "_apply_weight_decay",
        "_update_model_variables_moving_average",
        "_overwrite_model_variables_with_average_value",
    )
    return {
        "_var_key": _key,
        "_clip_gradients": _clip,
        "_backend_update_step": _update_each,
        **{name: _of_each(getattr(BaseOptimizer, name)) for name in one_by_one},
    }


def keys_known() -> Any:
    """Returns a context in which optimizers can be built for variables of parts."""
    return replaced(TFOptimizer, "_var_key", _key)


def are_known() -> bool:
    """Tells whether `methods` stand in their places now."""
    return TFOptimizer.__dict__["_backend_update_step"] is _update_each


def _key(optimizer: Any, variable: Any) -> Any:
    """`_var_key`: the parts have that of the whole."""
    in_parts = isinstance(variable, ShardedVariable)
    return _plain_key(optimizer, variable.parts[0] if in_parts else variable)


def _update_each(optimizer: Any, gradients: list, variables: list, learning_rate: Any) -> None:
    """`_backend_update_step`: each where it is; a server sends none of the moments it needs."""
    for gradient, variable in zip(gradients, variables, strict=True):
        if not isinstance(variable, ShardedVariable):
            with tf.device(variable.value.device):
                optimizer.update_step(gradient, variable.value, learning_rate)
            continue
        pieces = gradient if isinstance(gradient, ShardedGradient) else variable.cut(gradient)
        for number, piece in enumerate(pieces):
            own = variable.parts[number]
            with tf.device(own.device), part(number):
                optimizer.update_step(piece, own, learning_rate)


def _of_each(plain: Callable[..., None]) -> Callable[..., None]:
    """Returns what calls a method of Keras on the parts of its list of variables."""

    @functools.wraps(plain)
    def call(optimizer: Any, variables: list) -> None:
        if not any(isinstance(variable, ShardedVariable) for variable in variables):
            plain(optimizer, variables)
            return
        averages = getattr(optimizer, _AVERAGES, None)
        for place, variable in enumerate(variables):
            with ExitStack() as stack:
                if averages is not None and len(averages) == len(variables):
                    own = [averages[place]]
                    stack.enter_context(replaced(optimizer, _AVERAGES, own))
                if not isinstance(variable, ShardedVariable):
                    plain(optimizer, [variable])
                    continue
                for number, piece in enumerate(variable.parts):
                    with tf.device(piece.device), part(number):
                        plain(optimizer, [variable])

    return call


def _clip(optimizer: Any, gradients: list) -> list:
    """`_clip_gradients`, by the norms of whole gradients, as Keras takes them."""
    divided = [g for g in gradients if isinstance(g, ShardedGradient)]
    if not divided:
        return _plain_clip(optimizer, gradients)
    if optimizer.clipnorm and optimizer.clipnorm > 0:
        norms = iter(_norms(optimizer, divided))
        return [
            _clipped(g, next(norms), optimizer.clipnorm)
            if isinstance(g, ShardedGradient)
            else _plain_clip(optimizer, [g])[0]
            for g in gradients
        ]
    limit = optimizer.global_clipnorm
    if limit and limit > 0:
        squares = [_square(g) for g in gradients if not isinstance(g, ShardedGradient)]
        squares += [tf.square(norm) for norm in _norms(optimizer, divided)]
        norm = tf.sqrt(tf.add_n([tf.cast(s, squares[0].dtype) for s in squares]))
        # Not finite where the norm is not, as with Keras.
        scale = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        return [_times(g, scale) for g in gradients]
    return [
        ShardedGradient(_plain_clip(optimizer, list(g)))
        if isinstance(g, ShardedGradient)
        else _plain_clip(optimizer, [g])[0]
        for g in gradients
    ]


def _norms(optimizer: Any, gradients: list[ShardedGradient]) -> list[tf.Tensor]:
    """The norms of gradients of which this process has parts, in one exchange."""
    squares = [tf.add_n([_square(piece) for piece in g]) for g in gradients]
    divided = (v for v in optimizer._trainable_variables if isinstance(v, ShardedVariable))
    return [tf.sqrt(total) for total in next(divided).division.add_up(squares)]


def _clipped(gradient: ShardedGradient, norm: tf.Tensor, limit: float) -> ShardedGradient:
    """What `tf.clip_by_norm` makes of a gradient, of which the slices stay slices."""
    factor = limit / tf.maximum(norm, limit)
    return ShardedGradient(
        tf.math.scalar_mul(tf.cast(factor, piece.dtype), piece) for piece in gradient
    )


def _square(gradient: Any) -> tf.Tensor:
    return keras.ops.sum(keras.ops.square(gradient))


def _times(gradient: Any, factor: tf.Tensor) -> Any:
    if isinstance(gradient, ShardedGradient):
        return ShardedGradient(piece * tf.cast(factor, piece.dtype) for piece in gradient)
    return gradient * factor
