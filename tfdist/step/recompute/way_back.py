"""The gradients of what is computed again for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf


def with_gradient(
    again: Callable[..., list[tf.Tensor]],
    results: list[tf.Tensor],
    sources: list[tf.Tensor],
    watching: tf.GradientTape,
) -> list[tf.Tensor]:
    """Returns results, of which the gradients are those of what `again` computes from sources.

    Args:
        again: Takes sources and what to wait for.
        results: Computed before.
        sources: Of the results.
        watching: Knows the variables that were read for them.
    """
    device = results[0].device

    def backward(*upstream: tf.Tensor, variables: Sequence[Any] = ()) -> Any:
        with ExitStack() as stack:
            for context in _on(device):
                stack.enter_context(context)
            zero = _zero_after(upstream[0])
            with tf.GradientTape() as tape:
                new = [source + tf.cast(zero, source.dtype) for source in sources]
                tape.watch(new)
                made = again(new, [zero])
            wanted = [*new, *variables]
            if tf.executing_eagerly():
                found = tape.gradient(made, wanted, list(upstream))
            else:
                found = tf.gradients(made, wanted, list(upstream))
        own = found[: len(sources)]
        return (own, found[len(sources) :]) if variables else own

    @tf.custom_gradient
    def through(*_: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        for variable in watching.watched_variables():
            with tf.device(variable.device):
                tf.convert_to_tensor(variable)  # so that TensorFlow asks for its gradient, too
        # Stopped, or TensorFlow looks for variables in all that was computed before.
        return [tf.stop_gradient(result) for result in results], backward

    return tf.nest.flatten(through(*sources))


def _zero_after(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a zero that is there when a tensor is, and that no optimizer of graphs sees through.

    As `tf.recompute_grad` makes it: XLA heeds no control dependencies.
    """
    first = tf.reduce_max(tf.reshape(tensor, [-1])[:1])
    some = tf.cast(first, tf.bool)  # that of NaN, too, is one
    return tf.where(some == some, 0.0, float("nan"))


@contextmanager
def _nowhere() -> Iterator[None]:
    """Beside no operation, though gradients are made beside their forward operations."""
    graph = tf.compat.v1.get_default_graph()
    with graph.colocate_with(None, ignore_existing=True):
        yield


def _on(device: str) -> list[Any]:
    if tf.executing_eagerly():
        return []
    return [_nowhere(), tf.device(device)] if device else [_nowhere()]
