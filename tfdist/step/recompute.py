"""Activations that are not kept for the way back, but computed again: `keras.remat`, exactly.

Of a layer that is computed again only its inputs are kept (Chen et al. 2016, "Training Deep Nets
with Sublinear Memory Cost"). The second time it finds all variables as it found them the first:
random layers draw the same numbers. What it assigns, and the losses that it adds, count once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.upstream.keras_model import (
    logits_of,
    mask_of,
    set_logits,
    set_mask,
    stateless_scope,
)
from tfdist.upstream.keras_remat import surroundings


class _Found(dict):
    """The values of variables by their ids, as a `keras.StatelessScope` has them.

    Attributes:
        first: They before anything was assigned.
        read: Those that have been asked for, as they were at first.
    """

    def __init__(self, values: Any) -> None:
        super().__init__(values)
        self.first = dict(values)
        self.read: dict[int, Any] = {}

    def add(self, key: int, value: Any) -> None:
        """Notes a value that was there at first, and has been asked for."""
        self.first[key] = self.read[key] = self[key] = value

    def get(self, key: int, default: Any = None) -> Any:
        """Returns a value, and notes it."""
        value = super().get(key, default)
        if value is not None and value is self.first.get(key):
            self.read[key] = value
        return value


class _Made(NamedTuple):
    """What a call made.

    Attributes:
        outputs: As it returned them.
        losses: That layers added.
        updates: New values of variables.
    """

    outputs: Any
    losses: list[tf.Tensor]
    updates: list[tuple[keras.Variable, Any]]

    def differentiable(self) -> list[tf.Tensor]:
        """Returns all that a gradient may come from: logits behind probabilities, too."""
        outputs = [leaf for leaf in keras.tree.flatten(self.outputs) if _is_float(leaf)]
        logits = [logits_of(leaf) for leaf in outputs if logits_of(leaf) is not None]
        return [*outputs, *logits, *self.losses]

    def with_tensors(self, tensors: Sequence[tf.Tensor]) -> _Made:
        """Returns the same with others for what `differentiable` returns."""
        left = iter(tensors)
        leaves = keras.tree.flatten(self.outputs)
        new = [next(left) if _is_float(leaf) else leaf for leaf in leaves]
        for leaf, other in zip(leaves, new, strict=True):
            if _is_float(leaf) and logits_of(leaf) is not None:
                set_logits(other, next(left))
            if other is not leaf and mask_of(leaf) is not None:
                set_mask(other, mask_of(leaf))
        return _Made(keras.tree.pack_sequence_as(self.outputs, new), list(left), self.updates)


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of which the way back computes a function again; for `keras.remat`.

    Outside of a step, where no scope keeps assignments aside, it is called as it is.

    Raises:
        UnsupportedModelError: It cannot be computed again to the same gradients.
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        outer, given = stateless_scope(), keras.tree.flatten((args, options))
        floats = [leaf for leaf in given if _is_float(leaf)]
        others = [leaf for leaf in given if hasattr(leaf, "dtype") and not _is_tensor(leaf)]
        if outer is None or not floats or others:
            return function(*args, **options)
        masks, there = [mask_of(leaf) for leaf in given], surroundings()
        before, num_before = _Found(outer.state_mapping), _num_operations()
        with tf.GradientTape() as watching:
            first = _called(function, args, options, before, outer)
        values = before.first
        for variable, _ in first.updates:
            _check(function, not variable.trainable, f"assigns to {variable.path!r}")
            values.setdefault(id(variable), tf.convert_to_tensor(variable))
        from_scope = {key: value for key, value in before.read.items() if _is_float(value)}
        sources = [*floats, *from_scope.values()]
        _check_inputs(function, num_before, sources)

        def again(new: Sequence[tf.Tensor], after: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            """Computes once more, from sources that wait for gradients."""
            left = iter(new)
            with tf.control_dependencies(after):
                leaves = [next(left) if _is_float(x) else _same(x) for x in given]
            for leaf, mask in zip(leaves, masks, strict=True):
                if mask is not None:
                    set_mask(leaf, mask)
            own_args, own_options = keras.tree.pack_sequence_as((args, options), leaves)
            found = _Found(values | dict(zip(from_scope, left, strict=True)))
            with there():
                made = _called(function, own_args, own_options, found, outer)
            return made.differentiable()

        outputs = _with_gradient(again, first.differentiable(), sources, watching)
        made = first.with_tensors(outputs)
        for update in made.updates:
            outer.add_update(update)
        for loss in made.losses:
            outer.add_loss(loss)
        return made.outputs

    return call


class _Aside(keras.StatelessScope):
    """Keeps aside what one call assigns; finds what is joined for the first time in it outside.

    Args:
        found: What it finds.
        outer: The scope around it.
    """

    def __init__(self, found: _Found, outer: keras.StatelessScope) -> None:
        super().__init__(collect_losses=outer.collect_losses, initialize_variables=False)
        self.state_mapping, self._outer = found, outer
        self.updates: dict[int, tuple[keras.Variable, Any]] = {}

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        super().add_update(update)
        self.updates[id(update[0])] = (update[0], dict.get(self.state_mapping, id(update[0])))

    def get_current_value(self, variable: keras.Variable) -> Any:
        value = super().get_current_value(variable)
        return self.whole(variable) if value is None else value

    def whole(self, variable: keras.Variable) -> Any:
        """Returns what a variable that is kept in parts is together, as of `Scope`."""
        whole = getattr(self._outer, "whole", lambda _: None)(variable)
        if whole is not None:
            self.state_mapping.add(id(variable), whole)
        return whole


def _called(
    function: Callable[..., Any], args: Any, options: Any, found: _Found, outer: Any
) -> _Made:
    """Calls a function in a scope of its own."""
    with _Aside(found, outer) as scope:
        outputs = function(*args, **options)
    return _Made(outputs, list(scope.losses), list(scope.updates.values()))


def _with_gradient(
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


def _num_operations() -> int:
    if tf.executing_eagerly():
        return 0
    return len(tf.compat.v1.get_default_graph().get_operations())


def _check_inputs(
    function: Callable[..., Any], num_before: int, sources: Sequence[tf.Tensor]
) -> None:
    """Refuses what reads tensors that are no inputs, of which gradients would be lost."""
    if tf.executing_eagerly():
        return
    new = tf.compat.v1.get_default_graph().get_operations()[num_before:]
    known = {op.name for op in new} | {source.op.name for source in sources}
    for tensor in (tensor for op in new for tensor in op.inputs):
        is_fixed = tensor.op.type in ("Const", "Placeholder") or not _is_float(tensor)
        _check(
            function,
            is_fixed or tensor.op.name in known,
            f"reads {tensor.name!r}, which is none of its inputs",
        )


def _check(function: Callable[..., Any], holds: bool, why: str) -> None:
    if holds:
        return
    layer = getattr(function, "__self__", function)
    name = getattr(layer, "name", getattr(function, "__name__", "a function"))
    raise UnsupportedModelError(
        f"{name!r} cannot be computed again on the way back, for it {why}: leave it out of "
        "recompute=, or of keras.RematScope."
    )


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating


def _same(leaf: Any) -> Any:
    """Returns the same tensor under another name, so that it can bear another mask."""
    return tf.identity(leaf) if _is_tensor(leaf) else leaf
