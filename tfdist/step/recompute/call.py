"""A function that is called as `keras.remat` calls it, and computed again on the way back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.step.recompute.checks import check, check_inputs, num_operations
from tfdist.step.recompute.made import Found, called, is_float
from tfdist.step.recompute.way_back import with_gradient
from tfdist.upstream.keras_model import mask_of, set_mask, stateless_scope
from tfdist.upstream.keras_remat import surroundings


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of which the way back computes a function again; for `keras.remat`.

    Outside of a step, where no scope keeps assignments aside, it is called as it is.

    Raises:
        UnsupportedModelError: It cannot be computed again to the same gradients.
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        outer, given = stateless_scope(), keras.tree.flatten((args, options))
        floats = [leaf for leaf in given if is_float(leaf)]
        others = [
            leaf for leaf in given if hasattr(leaf, "dtype") and not isinstance(leaf, tf.Tensor)
        ]
        if outer is None or not floats or others:
            return function(*args, **options)
        masks, there = [mask_of(leaf) for leaf in given], surroundings()
        before, num_before = Found(outer.state_mapping), num_operations()
        with tf.GradientTape() as watching:
            first = called(function, args, options, before, outer)
        values = before.first
        for variable, _ in first.updates:
            check(function, not variable.trainable, f"assigns to {variable.path!r}")
            values.setdefault(id(variable), tf.convert_to_tensor(variable))
        from_scope = {key: value for key, value in before.read.items() if is_float(value)}
        sources = [*floats, *from_scope.values()]
        check_inputs(function, num_before, sources)

        def again(new: Sequence[tf.Tensor], after: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            """Computes once more, from sources that wait for gradients."""
            left = iter(new)
            with tf.control_dependencies(after):
                leaves = [next(left) if is_float(x) else _same(x) for x in given]
            for leaf, mask in zip(leaves, masks, strict=True):
                if mask is not None:
                    set_mask(leaf, mask)
            own_args, own_options = keras.tree.pack_sequence_as((args, options), leaves)
            found = Found(values | dict(zip(from_scope, left, strict=True)))
            with there():
                made = called(function, own_args, own_options, found, outer)
            return made.differentiable()

        outputs = with_gradient(again, first.differentiable(), sources, watching)
        made = first.with_tensors(outputs)
        for update in made.updates:
            outer.add_update(update)
        for loss in made.losses:
            outer.add_loss(loss)
        return made.outputs

    return call


def _same(leaf: Any) -> Any:
    """Returns the same tensor under another name, so that it can bear another mask."""
    return tf.identity(leaf) if isinstance(leaf, tf.Tensor) else leaf
