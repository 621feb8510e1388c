"""Which layers of a model are computed again on the way back: those that `recompute=` names.

A function that is called as `keras.remat` calls it, and computed again on the way back.

The gradients of what is computed again for them.

What a call of a layer finds and makes: values of variables, outputs, losses, assignments.

What cannot be computed again to the same gradients is refused.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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

#: Of which nothing is gained: they keep no more than what they return.
_CHEAP = (
    keras.layers.InputLayer,
    keras.layers.BatchNormalization,
    keras.layers.Embedding,
    keras.layers.Flatten,
    keras.layers.Reshape,
)


def prepare(recompute: str) -> None:
    """Lets `keras.remat` be exact, before a model is built, and checks what is to be recomputed.

    Args:
        recompute: `"none"`, `"all"` or a regular expression.

    Raises:
        ConfigurationError: It is none of these.
    """
    keras_remat.carry_out_by(recomputed)
    try:
        re.compile(recompute)
    except (re.error, TypeError) as error:
        raise ConfigurationError(
            f"recompute={recompute!r}: expected 'none', 'all' or a regular expression that finds "
            f"names of layers ({error})."
        ) from error


def chosen(model: keras.Model, recompute: str) -> list[keras.layers.Layer]:
    """Returns the layers of a model that are computed again, each as a whole.

    The outermost of those that are found; of models inside of a model, their layers.

    Args:
        model: Built.
        recompute: As `prepare` takes it, searched for in names like `"encoder/block_1/dense"`.

    Raises:
        ConfigurationError: No layer has such a name.
    """
    if recompute == "none":
        return []
    named = dict(_named(model, ""))
    found, inside = [], set[int]()
    for path, layer in named.items():
        if is_functional(layer) or id(layer) in inside:
            continue
        is_meant = not isinstance(layer, _CHEAP) if recompute == "all" else None
        if is_meant or (is_meant is None and re.search(recompute, path)):
            found.append(layer)
            inside |= {id(inner) for inner in flatten_layers(layer)}
    if not found and recompute != "all":
        raise ConfigurationError(
            f"recompute={recompute!r} finds none of the layers {', '.join(list(named)[:8])}."
        )
    return found


@contextmanager
def computed_again(model: keras.Model, recompute: str, sync_batch_norm: bool) -> Iterator[None]:
    """Within it, while a step is traced, these layers are handed to `keras.remat`.

    Besides those that were made in a `keras.RematScope`.

    Raises:
        UnsupportedModelError: One of them exchanges sums with other replicas.
    """
    with ExitStack() as stack:
        again = chosen(model, recompute)
        for layer in again:
            stack.enter_context(keras_remat.asking(layer))
        asked = [layer for layer in flatten_layers(model) if keras_remat.asks(layer)]
        _check_alone([*again, *asked], sync_batch_norm)
        for layer in asked:
            if layer is model or isinstance(layer, _CHEAP) or _asks_for_its_layers(layer, asked):
                stack.enter_context(keras_remat.asking(layer, does=False))
        yield


def _asks_for_its_layers(layer: keras.layers.Layer, asked: Sequence[keras.layers.Layer]) -> bool:
    """Whether a model inside of a model was made in one scope with layers of its own.

    Computed again as a whole, all that these keep would be there at a time.
    """
    inner = {id(own) for own in flatten_layers(layer)[1:]}
    return isinstance(layer, keras.Model) and any(id(other) in inner for other in asked)


def _named(layer: keras.layers.Layer, path: str) -> Iterator[tuple[str, keras.layers.Layer]]:
    """Yields the layers of a layer with their paths, outer ones first, each once."""
    inner = flatten_layers(layer)[1:]
    deeper = {id(own) for other in inner for own in flatten_layers(other)[1:]}
    for own in inner:
        if id(own) not in deeper:
            yield path + own.name, own
            yield from _named(own, f"{path}{own.name}/")


def _check_alone(layers: Sequence[keras.layers.Layer], sync_batch_norm: bool) -> None:
    for layer in layers:
        for inner in flatten_layers(layer):
            is_norm = isinstance(inner, keras.layers.BatchNormalization)
            if is_norm and inner is not layer and (sync_batch_norm or inner.synchronized):
                raise UnsupportedModelError(
                    f"{layer.name!r} cannot be computed again on the way back: {inner.name!r} in "
                    "it takes moments of all replicas. Leave it out of recompute=, or sync_batch_"
                    "norm."
                )


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


class Found(dict):
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


class Made(NamedTuple):
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
        outputs = [leaf for leaf in keras.tree.flatten(self.outputs) if is_float(leaf)]
        logits = [logits_of(leaf) for leaf in outputs if logits_of(leaf) is not None]
        return [*outputs, *logits, *self.losses]

    def with_tensors(self, tensors: Sequence[tf.Tensor]) -> Made:
        """Returns the same with others for what `differentiable` returns."""
        left = iter(tensors)
        leaves = keras.tree.flatten(self.outputs)
        new = [next(left) if is_float(leaf) else leaf for leaf in leaves]
        for leaf, other in zip(leaves, new, strict=True):
            if is_float(leaf) and logits_of(leaf) is not None:
                set_logits(other, next(left))
            if other is not leaf and mask_of(leaf) is not None:
                set_mask(other, mask_of(leaf))
        return Made(keras.tree.pack_sequence_as(self.outputs, new), list(left), self.updates)


class Aside(keras.StatelessScope):
    """Keeps aside what one call assigns; finds what is joined for the first time in it outside.

    Args:
        found: What it finds.
        outer: The scope around it.
    """

    def __init__(self, found: Found, outer: keras.StatelessScope) -> None:
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


def called(function: Callable[..., Any], args: Any, options: Any, found: Found, outer: Any) -> Made:
    """Calls a function in a scope of its own.

    Args:
        function: Of a layer.
        args: By position.
        options: By name.
        found: What it finds of variables.
        outer: The scope around it, which gets none of its assignments and losses.
    """
    with Aside(found, outer) as scope:
        outputs = function(*args, **options)
    return Made(outputs, list(scope.losses), list(scope.updates.values()))


def is_float(leaf: Any) -> bool:
    """Whether it is a tensor that may have a gradient."""
    return isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating


def num_operations() -> int:
    """Returns how many operations the graph has that is being traced."""
    if tf.executing_eagerly():
        return 0
    return len(tf.compat.v1.get_default_graph().get_operations())


def check_inputs(
    function: Callable[..., Any], num_before: int, sources: Sequence[tf.Tensor]
) -> None:
    """Refuses what reads tensors that are no inputs, of which gradients would be lost.

    Args:
        function: It.
        num_before: Of operations, when it was called.
        sources: Its inputs, and the variables that it read.

    Raises:
        UnsupportedModelError: It does.
    """
    if tf.executing_eagerly():
        return
    new = tf.compat.v1.get_default_graph().get_operations()[num_before:]
    known = {op.name for op in new} | {source.op.name for source in sources}
    for tensor in (tensor for op in new for tensor in op.inputs):
        is_fixed = tensor.op.type in ("Const", "Placeholder") or not is_float(tensor)
        check(
            function,
            is_fixed or tensor.op.name in known,
            f"reads {tensor.name!r}, which is none of its inputs",
        )


def check(function: Callable[..., Any], holds: bool, why: str) -> None:
    """Refuses a function unless something holds.

    Raises:
        UnsupportedModelError: It does not, which is why.
    """
    if holds:
        return
    layer = getattr(function, "__self__", function)
    name = getattr(layer, "name", getattr(function, "__name__", "a function"))
    raise UnsupportedModelError(
        f"{name!r} cannot be computed again on the way back, for it {why}: leave it out of "
        "recompute=, or of keras.RematScope."
    )
