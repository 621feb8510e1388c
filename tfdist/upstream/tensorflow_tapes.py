"""Gradients of sharded variables that a user's own tape takes.

Every read of a sharded variable gathers its shards anew, so a tape knows the shards and not the
result. A source of `GradientTape.gradient` may be a composite tensor, though: TensorFlow then takes
the gradients of its components and asks `CompositeTensorGradient` to put them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import tensorflow as tf
from tensorflow.python.framework.composite_tensor import CompositeTensor
from tensorflow.python.framework.composite_tensor_gradient import CompositeTensorGradient


class _GradientOfShards(CompositeTensorGradient):
    """Takes the gradients of the shards for the gradient of the full value."""

    def get_gradient_components(self, value: GradientSource) -> list[tf.Tensor]:
        return [shard.handle for shard in value.shards()]

    def replace_gradient_components(
        self, value: GradientSource, component_grads: Sequence[Any]
    ) -> tf.Tensor | None:
        if all(gradient is None for gradient in component_grads):
            return None
        dense = [
            tf.zeros_like(shard) if gradient is None else tf.convert_to_tensor(gradient)
            for shard, gradient in zip(value.shards(), component_grads, strict=True)
        ]
        return value.join(dense)


class GradientSource(CompositeTensor):
    """What a sharded variable returns as its `handle`, which a tape differentiates by.

    Args:
        shards: Returns the shards; raises if this process does not have all of them.
        join: Returns the full tensor of tensors for the shards.
    """

    __composite_gradient__ = _GradientOfShards()
    dtype = tf.resource

    def __init__(
        self,
        shards: Callable[[], Sequence[tf.Variable]],
        join: Callable[[list[tf.Tensor]], tf.Tensor],
    ) -> None:
        self.shards, self.join = shards, join

    @property
    def _type_spec(self) -> NoReturn:
        raise TypeError("A sharded variable has no single resource that an operation could take.")

    def _shape_invariant_to_type_spec(self, shape: Any) -> NoReturn:
        raise TypeError("A sharded variable has no single resource that a loop could carry.")


def stand_for(value: tf.Tensor, source: GradientSource) -> None:
    """Lets a tape take the gradient of a variable when it is given the variable's full value.

    `GradientTape` uses the `handle` of whatever has `_should_act_as_resource_variable`.
    """
    value._should_act_as_resource_variable = True
    value.handle = source
