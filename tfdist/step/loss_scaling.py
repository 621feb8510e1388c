"""Scaling of the loss, and unscaling of the gradients.

The loss is scaled before the gradients are computed, so that small float16 gradients do not
underflow. After the all-reduce, the gradients are unscaled and checked once for all replicas. If
they are not finite, the step is skipped (Micikevicius et al. 2018, "Mixed Precision Training").
Small gradients are packed for that, because on a GPU each operation is a kernel to queue.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.groups.fusion import on_each_device, packed_for_kernels
from tfdist.precision import LossScale
from tfdist.upstream.keras_variables import pieces
from tfdist.upstream.tensorflow_graphs import is_from_half, traces_for_xla

#: From here on, float32 is rounded to infinity in float16.
HALF_OVERFLOW = 65520.0


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
        in_half: Places of gradients that one device computes in float16, where the sum over the
            rows of all replicas may overflow.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, rule: LossScale | None) -> None:
        self.active = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        self.optimizer = optimizer.inner_optimizer if self.active else optimizer
        self.variables: list[keras.Variable] = []
        self.in_half: set[int] = set()
        if self.active:
            self._state = optimizer
            self._rule = rule or LossScale(optimizer.initial_scale, optimizer.dynamic_growth_steps)
            self.skipped = keras.Variable(0, dtype="int64", trainable=False, name="skipped_steps")
            self.variables.append(self.skipped)

    def scale(self, loss: tf.Tensor) -> tf.Tensor:
        """Scales a replica's part of the loss before its gradients are computed."""
        return loss * self._state.dynamic_scale if self.active else self.optimizer.scale_loss(loss)

    def note_parts(self, gradients: Mapping[int, Any]) -> None:
        """Notes which of a replica's gradients, by place, are computed in float16."""
        self.in_half = {i for i, g in gradients.items() if all(map(is_from_half, pieces(g)))}

    def unscale(self, gradients: list) -> list:
        """Divides gradients by the loss scale."""
        if not self.active:
            return gradients
        present = [g for g in gradients if g is not None]
        unscaled = iter(on_each_device(self._divided, present))
        return [None if g is None else next(unscaled) for g in gradients]

    def overflows(self, gradients: Mapping[int, Any], limit: Any = None) -> tf.Tensor:
        """Returns 0 if all gradients are finite or no loss is scaled, otherwise more; int32.

        Args:
            gradients: By place: tensors, `tf.IndexedSlices`, shards or None.
            limit: Number that is too large for those which one device computes in float16.
        """
        if not self.active:
            return tf.constant(0)
        finite: list[tf.Tensor] = []

        def check(tensors: list, is_finite: Callable[[tf.Tensor], tf.Tensor]) -> list:
            values = [t.values if isinstance(t, tf.IndexedSlices) else t for t in tensors]
            few, _ = packed_for_kernels(values)
            finite.extend(tf.reduce_all(is_finite(v)) for v in few)
            return tensors

        checks = (tf.math.is_finite, lambda v: tf.abs(v) < tf.cast(limit, v.dtype))
        for is_limited, is_finite in enumerate(checks):
            places = [
                i for i in gradients if (limit is not None and i in self.in_half) == is_limited
            ]
            present = [p for i in places for p in pieces(gradients[i]) if p is not None]
            on_each_device(functools.partial(check, is_finite=is_finite), present)
        if not finite:
            return tf.constant(0)
        # Stacked before they are counted: GPUs leave sums of int32 to the host.
        return tf.math.count_nonzero(~tf.stack(finite), dtype=tf.int32)

    def apply(
        self,
        gradients: list,
        overwritten: Mapping[int, tf.Tensor],
        commit: Callable[[list], None],
        any_of_shards: Callable[[tf.Tensor], tf.Tensor],
    ) -> None:
        """Unscales reduced gradients, and commits the step if they are finite.

        Args:
            gradients: By place: tensors, `tf.IndexedSlices` or None, the same on every replica, or
                shards.
            overwritten: New values of variables, by place, that are passed on without a scale.
            commit: Applies unscaled gradients and all other changes of the step.
            any_of_shards: See `Strategy.any_of_parts`.
        """

        def with_overwritten(gradients: list) -> list:
            return [overwritten.get(i, gradient) for i, gradient in enumerate(gradients)]

        if not self.active:
            commit(with_overwritten(gradients))
            return
        unscaled = with_overwritten(
            tf.nest.pack_sequence_as(gradients, self.unscale(tf.nest.flatten(gradients)))
        )
        # Those of several batches are added in float32, also on one device.
        is_of_batch = not self.optimizer.gradient_accumulation_steps
        limit = HALF_OVERFLOW / self._state.dynamic_scale if is_of_batch else None
        finite = ~any_of_shards(self.overflows(dict(enumerate(unscaled)), limit) > 0)

        def apply_step() -> tf.Tensor:
            commit(unscaled)
            return tf.constant(True)

        if traces_for_xla():
            _select(finite, apply_step)
        else:
            tf.cond(finite, apply_step, lambda: tf.constant(False))
        self.update(finite)

    def apply_gradients(self, gradients: list, variables: list[keras.Variable]) -> None:
        """Calls the method of the optimizer that Keras calls, which may be overridden."""
        if self.active:  # a LossScaleOptimizer calls `apply` of the one inside
            self.optimizer.apply(gradients, variables)
        else:
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def update(self, finite: tf.Tensor) -> None:
        """Updates the scale, and counts skipped steps."""
        rule, state = self._rule, self._state
        counter = tf.convert_to_tensor(state.step_counter)
        grows = finite & (counter >= rule.growth_interval - 1)
        factor = tf.where(grows, rule.growth_factor, tf.where(finite, 1.0, rule.backoff_factor))
        state.dynamic_scale.assign(state.dynamic_scale * factor)
        state.step_counter.assign(tf.where(finite & ~grows, counter + 1, 0))
        self.skipped.assign_add(tf.cast(~finite, "int64"))

    def _divided(self, gradients: list) -> list:
        scale = tf.convert_to_tensor(self._state.dynamic_scale)
        few, apart = packed_for_kernels(gradients)
        return apart([keras.ops.divide(g, tf.cast(scale, g.dtype)) for g in few])

    def logs(self) -> dict[str, tf.Tensor]:
        """Returns the scale and the number of skipped steps so far."""
        if not self.active:
            return {}
        return {
            "loss_scale": tf.convert_to_tensor(self._state.dynamic_scale),
            "skipped_steps": tf.convert_to_tensor(self.skipped),
        }


def _select(condition: tf.Tensor, change: Callable[[], Any]) -> None:
    """Changes variables if a condition holds, without a branch, for which XLA would copy them."""
    function = tf.function(change, autograph=False).get_concrete_function()
    before = [(v, v.read_value()) for v in function.graph.variables]
    function()
    for variable, old in before:
        variable.assign(tf.where(condition, variable.read_value(), old))
