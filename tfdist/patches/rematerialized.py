"""An exact `keras.remat`: a function whose backward pass recomputes it.

Only the inputs of a rematerialized layer are kept, and the backward pass computes the layer once
more (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"). The second time, the layer
finds all variables as it found them the first time, so that random layers draw the same numbers.
Its assignments and the losses that it adds count once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.replica.scope import ReplicaScope
from tfdist.upstream.keras_layers import call_context
from tfdist.upstream.keras_model import logits_of, mask_of, set_logits, set_mask, stateless_scope

_is_lifted: ContextVar[bool] = ContextVar("is_lifted", default=False)


def rematerialized(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose backward pass recomputes it; used in place of `keras.remat`.

    Outside of a step, where no scope keeps assignments aside, the function is called unchanged.

    Raises:
        UnsupportedModelError: The function cannot be recomputed with the same gradients.
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        outer, given = stateless_scope(), keras.tree.flatten((args, options))
        floats = [leaf for leaf in given if _is_float(leaf)]
        others = [
            leaf for leaf in given if hasattr(leaf, "dtype") and not isinstance(leaf, tf.Tensor)
        ]
        if _is_lifted.get() or outer is None or not floats or others:
            return function(*args, **options)
        masks, restored = [mask_of(leaf) for leaf in given], call_context()
        before, num_before = _Values(outer.state_mapping), 0
        if not tf.executing_eagerly():
            num_before = len(tf.compat.v1.get_default_graph().get_operations())
        with tf.GradientTape() as watching:
            first = _called(function, args, options, before, outer)
        values = before.initial
        for variable, _ in first.updates:
            _require(function, not variable.trainable, f"it assigns to {variable.path!r}")
            values.setdefault(id(variable), tf.convert_to_tensor(variable))
        from_scope = {key: value for key, value in before.read.items() if _is_float(value)}
        sources = [*floats, *from_scope.values()]
        _check_inputs(function, num_before, sources)

        def again(new: Sequence[tf.Tensor], after: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            """Computes the function once more, from sources that wait for `after`."""
            left = iter(new)
            with tf.control_dependencies(after):
                leaves = [next(left) if _is_float(x) else _copied(x) for x in given]
            for leaf, mask in zip(leaves, masks, strict=True):
                if mask is not None:
                    set_mask(leaf, mask)
            new_args, new_options = keras.tree.pack_sequence_as((args, options), leaves)
            restored_values = _Values(values | dict(zip(from_scope, left, strict=True)))
            with restored():
                results = _called(function, new_args, new_options, restored_values, outer)
            return results.differentiable()

        outputs = _with_gradient(again, first.differentiable(), sources, watching)
        results = first.with_tensors(outputs)
        for update in results.updates:
            outer.add_update(update)
        for loss in results.losses:
            outer.add_loss(loss)
        return results.outputs

    return call


def _with_gradient(
    again: Callable[..., list[tf.Tensor]],
    results: list[tf.Tensor],
    sources: list[tf.Tensor],
    watching: tf.GradientTape,
) -> list[tf.Tensor]:
    """Returns results whose gradients are those of what `again` computes from sources."""
    device = results[0].device

    def backward(*upstream: tf.Tensor, variables: Sequence[Any] = ()) -> Any:
        with ExitStack() as stack:
            for context in _on(device):
                stack.enter_context(context)
            # As in `tf.recompute_grad`, because XLA ignores control dependencies: no graph
            # optimizer simplifies a zero like this one.
            first = tf.reduce_max(tf.reshape(upstream[0], [-1])[:1])
            some = tf.cast(first, tf.bool)  # True for NaN, too
            zero = tf.where(some == some, 0.0, float("nan"))
            with tf.GradientTape() as tape:
                new = [source + tf.cast(zero, source.dtype) for source in sources]
                tape.watch(new)
                recomputed = again(new, [zero])
            differentiated = [*new, *variables]
            if tf.executing_eagerly():
                grads = tape.gradient(recomputed, differentiated, list(upstream))
            else:
                # A variable may also be read before the sources, as by a layer called twice.
                grads = tf.gradients(recomputed, differentiated, list(upstream), stop_gradients=new)
        of_sources = grads[: len(sources)]
        return (of_sources, grads[len(sources) :]) if variables else of_sources

    @tf.custom_gradient
    def through(*_: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        for variable in watching.watched_variables():
            with tf.device(variable.device):
                tf.convert_to_tensor(variable)  # so that TensorFlow asks for its gradient as well
        # Stopped, or TensorFlow searches the whole forward pass before them for variables.
        return [tf.stop_gradient(result) for result in results], backward

    return tf.nest.flatten(through(*sources))


@contextmanager
def lifted() -> Iterator[None]:
    """Returns a context in which functions are called as if they were not rematerialized."""
    token = _is_lifted.set(True)
    try:
        yield
    finally:
        _is_lifted.reset(token)


class _Values(dict):
    """The values of variables by id, in the form that a `keras.StatelessScope` keeps them.

    Attributes:
        initial: The values before anything was assigned.
        read: The initial values of variables that were read.
    """

    def __init__(self, values: Any) -> None:
        super().__init__(values)
        self.initial = dict(values)
        self.read: dict[int, Any] = {}

    def add(self, key: int, value: Any) -> None:
        self.initial[key] = self.read[key] = self[key] = value

    def get(self, key: int, default: Any = None) -> Any:
        value = super().get(key, default)
        if value is not None and value is self.initial.get(key):
            self.read[key] = value
        return value


class _CallResults(NamedTuple):
    """The results of one call of a function.

    Attributes:
        outputs: What it returned.
        losses: Losses that layers added.
        updates: New values of variables.
    """

    outputs: Any
    losses: list[tf.Tensor]
    updates: list[tuple[keras.Variable, Any]]

    def differentiable(self) -> list[tf.Tensor]:
        """Returns all tensors that a gradient may come from, also logits of probabilities."""
        outputs = [leaf for leaf in keras.tree.flatten(self.outputs) if _is_float(leaf)]
        logits = [logits_of(leaf) for leaf in outputs if logits_of(leaf) is not None]
        return [*outputs, *logits, *self.losses]

    def with_tensors(self, tensors: Sequence[tf.Tensor]) -> _CallResults:
        """Returns the same results with other tensors for those of `differentiable`."""
        left = iter(tensors)
        leaves = keras.tree.flatten(self.outputs)
        new = [next(left) if _is_float(leaf) else leaf for leaf in leaves]
        for leaf, other in zip(leaves, new, strict=True):
            if _is_float(leaf) and logits_of(leaf) is not None:
                set_logits(other, next(left))
            if other is not leaf and mask_of(leaf) is not None:
                set_mask(other, mask_of(leaf))
        outputs = keras.tree.pack_sequence_as(self.outputs, new)
        return _CallResults(outputs, list(left), self.updates)


class _CallScope(ReplicaScope):
    """Keeps the assignments of one call aside; gathers sharded variables in the outer scope."""

    def __init__(self, values: _Values, outer: keras.StatelessScope) -> None:
        super().__init__(collect_losses=outer.collect_losses, initialize_variables=False)
        self.state_mapping, self._outer = values, outer

    def get_current_value(self, variable: keras.Variable) -> Any:
        value = super().get_current_value(variable)
        return self.whole(variable) if value is None else value

    def whole(self, variable: keras.Variable) -> Any:
        """Returns a sharded variable gathered, as `parameter_gather.Scope.whole` does."""
        whole = getattr(self._outer, "whole", lambda _: None)(variable)
        if whole is not None:
            self.state_mapping.add(id(variable), whole)
        return whole


def _called(
    function: Callable[..., Any], args: Any, options: Any, values: _Values, outer: Any
) -> _CallResults:
    """Calls a function in a scope of its own."""
    with _CallScope(values, outer) as scope:
        outputs = function(*args, **options)
    updates = [(v, dict.get(values, key)) for key, v in scope.updated.items()]
    return _CallResults(outputs, list(scope.losses), updates)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating


def _copied(leaf: Any) -> Any:
    return tf.identity(leaf) if isinstance(leaf, tf.Tensor) else leaf


@contextmanager
def not_colocated() -> Iterator[None]:
    """Returns a context without the colocation of gradients with their forward operations."""
    graph = tf.compat.v1.get_default_graph()
    with graph.colocate_with(None, ignore_existing=True):
        yield


def _on(device: str) -> list[Any]:
    if tf.executing_eagerly():
        return []
    return [not_colocated(), tf.device(device)] if device else [not_colocated()]


def _check_inputs(
    function: Callable[..., Any], num_before: int, sources: Sequence[tf.Tensor]
) -> None:
    """Refuses a function that reads tensors besides its inputs, whose gradients would be lost.

    Raises:
        UnsupportedModelError: It does.
    """
    if tf.executing_eagerly():
        return
    new = tf.compat.v1.get_default_graph().get_operations()[num_before:]
    computed = {op.name for op in new} | {source.op.name for source in sources}
    for tensor in (tensor for op in new for tensor in op.inputs):
        is_constant = tensor.op.type in ("Const", "Placeholder") or not _is_float(tensor)
        _require(
            function,
            is_constant or tensor.op.name in computed,
            f"it reads {tensor.name!r}, which is not one of its inputs",
        )


def _require(function: Callable[..., Any], holds: bool, reason: str) -> None:
    """Refuses a function unless a condition holds."""
    if holds:
        return
    layer = getattr(function, "__self__", function)
    name = getattr(layer, "name", getattr(function, "__name__", "a function"))
    raise UnsupportedModelError(
        f"{name!r} cannot be rematerialized, because {reason}. Exclude it from remat=, or from "
        "keras.RematScope."
    )
