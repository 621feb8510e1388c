"""Activation checkpointing: `keras.remat` for replicas, with exactly the same gradients.

Of a rematerialized layer only the inputs are kept, and the backward pass computes the layer once
more (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"). The second time, the layer
finds all variables as it found them the first time, so that random layers draw the same numbers.
Its assignments and the losses that it adds count once.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.errors import ConfigurationError, UnsupportedModelError
from tfdist.upstream import keras_remat
from tfdist.upstream.keras_model import (
    flatten_layers,
    is_functional,
    logits_of,
    mask_of,
    set_logits,
    set_mask,
    stateless_scope,
)
from tfdist.upstream.keras_remat import surroundings

#: Layers that keep no more than what they return, so that remat gains nothing.
_CHEAP = (
    keras.layers.InputLayer,
    keras.layers.BatchNormalization,
    keras.layers.Embedding,
    keras.layers.Flatten,
    keras.layers.Reshape,
)


def check(remat: str) -> None:
    """Checks the argument `remat` of a `Trainer`.

    Args:
        remat: `"none"`, `"all"`, or a regular expression.

    Raises:
        ConfigurationError: It is none of these.
    """
    try:
        re.compile(remat)
    except (re.error, TypeError) as error:
        raise ConfigurationError(
            f"remat={remat!r}: expected 'none', 'all', or a regular expression that finds names of "
            f"layers ({error})."
        ) from error


def exact_remat() -> AbstractContextManager[None]:
    """Returns a context in which `keras.remat` is `rematerialized`."""
    return keras_remat.carried_out_by(rematerialized)


def chosen(model: keras.Model, remat: str) -> list[keras.layers.Layer]:
    """Returns the layers of a model to rematerialize, each as a whole.

    Where one of them contains another, the outer one. Of a model inside of a model, its layers.

    Args:
        model: Built.
        remat: As `check` takes it; searched for in names like `"encoder/block_1/dense"`.

    Raises:
        ConfigurationError: No layer has such a name.
    """
    if remat == "none":
        return []
    named = dict(_named(model, ""))
    found, inside = [], set[int]()
    for path, layer in named.items():
        if is_functional(layer) or id(layer) in inside:
            continue
        is_chosen = not isinstance(layer, _CHEAP) if remat == "all" else re.search(remat, path)
        if is_chosen:
            found.append(layer)
            inside |= {id(inner) for inner in flatten_layers(layer)}
    if not found and remat != "all":
        raise ConfigurationError(
            f"remat={remat!r} matches none of the layers {', '.join(list(named)[:8])}."
        )
    return found


@contextmanager
def layers_rematerialized(model: keras.Model, remat: str, sync_batch_norm: bool) -> Iterator[None]:
    """Returns a context to trace a step in, in which layers are called through `keras.remat`.

    These are the layers that `remat` names, and those that were made in a `keras.RematScope`.

    Raises:
        UnsupportedModelError: One of the layers sums over replicas.
    """
    with ExitStack() as stack:
        stack.enter_context(exact_remat())
        named = chosen(model, remat)
        for layer in named:
            stack.enter_context(keras_remat.asking(layer))
        marked = [layer for layer in flatten_layers(model) if keras_remat.asks(layer)]
        _check_exchanges_nothing([*named, *marked], sync_batch_norm)
        for layer in marked:
            if layer is model or isinstance(layer, _CHEAP) or _has_marked_layers(layer, marked):
                stack.enter_context(keras_remat.asking(layer, does=False))
        yield


def rematerialized(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose backward pass computes it again; used in place of `keras.remat`.

    Outside of a step, where no scope keeps assignments aside, the function is called unchanged.

    Raises:
        UnsupportedModelError: The function cannot be computed again with the same gradients.
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        outer, given = stateless_scope(), keras.tree.flatten((args, options))
        floats = [leaf for leaf in given if _is_float(leaf)]
        others = [
            leaf for leaf in given if hasattr(leaf, "dtype") and not isinstance(leaf, tf.Tensor)
        ]
        if outer is None or not floats or others:
            return function(*args, **options)
        masks, restored = [mask_of(leaf) for leaf in given], surroundings()
        before, num_before = _Values(outer.state_mapping), _num_operations()
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
            found = _Values(values | dict(zip(from_scope, left, strict=True)))
            with restored():
                results = _called(function, new_args, new_options, found, outer)
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
    """Returns results whose gradients are those of what `again` computes from sources.

    Args:
        again: Takes sources, and tensors to wait for.
        results: Computed before, in the forward pass.
        sources: What the results were computed from.
        watching: Has recorded which variables they read.
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
                recomputed = again(new, [zero])
            wanted = [*new, *variables]
            if tf.executing_eagerly():
                found = tape.gradient(recomputed, wanted, list(upstream))
            else:
                found = tf.gradients(recomputed, wanted, list(upstream))
        of_sources = found[: len(sources)]
        return (of_sources, found[len(sources) :]) if variables else of_sources

    @tf.custom_gradient
    def through(*_: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        for variable in watching.watched_variables():
            with tf.device(variable.device):
                tf.convert_to_tensor(variable)  # so that TensorFlow asks for its gradient as well
        # Stopped, or TensorFlow searches the whole forward pass before them for variables.
        return [tf.stop_gradient(result) for result in results], backward

    return tf.nest.flatten(through(*sources))


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
        """Adds an initial value that was read."""
        self.initial[key] = self.read[key] = self[key] = value

    def get(self, key: int, default: Any = None) -> Any:
        """Returns a value, and notes that it was read."""
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


class _CallScope(keras.StatelessScope):
    """Keeps the assignments of one call aside; gathers sharded variables in the outer scope.

    Args:
        values: The values that the call finds.
        outer: The scope around it.
    """

    def __init__(self, values: _Values, outer: keras.StatelessScope) -> None:
        super().__init__(collect_losses=outer.collect_losses, initialize_variables=False)
        self.state_mapping, self._outer = values, outer
        self.updates: dict[int, tuple[keras.Variable, Any]] = {}

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        super().add_update(update)
        self.updates[id(update[0])] = (update[0], dict.get(self.state_mapping, id(update[0])))

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
    """Calls a function in a scope of its own.

    Args:
        function: A layer's call, or any function.
        args: Positional arguments.
        options: Keyword arguments.
        values: The values of variables that the call finds.
        outer: The scope around it, which gets none of its assignments and losses.
    """
    with _CallScope(values, outer) as scope:
        outputs = function(*args, **options)
    return _CallResults(outputs, list(scope.losses), list(scope.updates.values()))


def _is_float(leaf: Any) -> bool:
    """Tells whether something is a tensor that may have a gradient."""
    return isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating


def _copied(leaf: Any) -> Any:
    """Returns a copy of a tensor, which can have another mask."""
    return tf.identity(leaf) if isinstance(leaf, tf.Tensor) else leaf


def _zero_after(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a zero that depends on a tensor in a way that no graph optimizer simplifies.

    It is made as in `tf.recompute_grad`, because XLA ignores control dependencies.
    """
    first = tf.reduce_max(tf.reshape(tensor, [-1])[:1])
    some = tf.cast(first, tf.bool)  # True for NaN, too
    return tf.where(some == some, 0.0, float("nan"))


@contextmanager
def _not_colocated() -> Iterator[None]:
    """Lifts the colocation of gradients with their forward operations."""
    graph = tf.compat.v1.get_default_graph()
    with graph.colocate_with(None, ignore_existing=True):
        yield


def _on(device: str) -> list[Any]:
    if tf.executing_eagerly():
        return []
    return [_not_colocated(), tf.device(device)] if device else [_not_colocated()]


def _num_operations() -> int:
    """Returns the number of operations in the graph that is being traced."""
    if tf.executing_eagerly():
        return 0
    return len(tf.compat.v1.get_default_graph().get_operations())


def _check_inputs(
    function: Callable[..., Any], num_before: int, sources: Sequence[tf.Tensor]
) -> None:
    """Refuses a function that reads tensors besides its inputs, whose gradients would be lost.

    Args:
        function: The function that was called.
        num_before: Number of operations in the graph before the call.
        sources: Its inputs, and the variables that it read.

    Raises:
        UnsupportedModelError: It does.
    """
    if tf.executing_eagerly():
        return
    new = tf.compat.v1.get_default_graph().get_operations()[num_before:]
    known = {op.name for op in new} | {source.op.name for source in sources}
    for tensor in (tensor for op in new for tensor in op.inputs):
        is_constant = tensor.op.type in ("Const", "Placeholder") or not _is_float(tensor)
        _require(
            function,
            is_constant or tensor.op.name in known,
            f"it reads {tensor.name!r}, which is not one of its inputs",
        )


def _require(function: Callable[..., Any], holds: bool, reason: str) -> None:
    """Refuses a function unless a condition holds.

    Raises:
        UnsupportedModelError: The condition does not hold; the message has the reason.
    """
    if holds:
        return
    layer = getattr(function, "__self__", function)
    name = getattr(layer, "name", getattr(function, "__name__", "a function"))
    raise UnsupportedModelError(
        f"{name!r} cannot be rematerialized, because {reason}. Exclude it from remat=, or from "
        "keras.RematScope."
    )


def _named(layer: keras.layers.Layer, path: str) -> Iterator[tuple[str, keras.layers.Layer]]:
    """Yields the layers of a layer with their paths, outer ones first, each once."""
    inner = flatten_layers(layer)[1:]
    deeper = {id(one) for other in inner for one in flatten_layers(other)[1:]}
    for one in inner:
        if id(one) not in deeper:
            yield path + one.name, one
            yield from _named(one, f"{path}{one.name}/")


def _has_marked_layers(layer: keras.layers.Layer, marked: Sequence[keras.layers.Layer]) -> bool:
    """Tells whether a model inside of a model was made in one `keras.RematScope` with its layers.

    Rematerialized as a whole, it would need the memory of all its layers at once.
    """
    inner = {id(one) for one in flatten_layers(layer)[1:]}
    return isinstance(layer, keras.Model) and any(id(other) in inner for other in marked)


def _check_exchanges_nothing(layers: Sequence[keras.layers.Layer], sync_batch_norm: bool) -> None:
    for layer in layers:
        for inner in flatten_layers(layer):
            is_norm = isinstance(inner, keras.layers.BatchNormalization)
            if is_norm and inner is not layer and (sync_batch_norm or inner.synchronized):
                raise UnsupportedModelError(
                    f"{layer.name!r} cannot be rematerialized: {inner.name!r} in it sums moments "
                    "over all replicas. Exclude it from remat=, or do not use sync_batch_norm."
                )
