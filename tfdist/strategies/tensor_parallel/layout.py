"""Decides for each layer of a model whether and how it is split over devices."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.errors import ConfigurationError
from tfdist.strategies.sharded.plan import can_be_cut, reason_whole
from tfdist.strategies.tensor_parallel import splits
from tfdist.strategies.tensor_parallel.row_parts import computes_by_rows
from tfdist.strategies.tensor_parallel.rules import Rules
from tfdist.strategies.tensor_parallel.splits import ELEMENTWISE, Split, keeps_parts
from tfdist.upstream.keras_layers import operations_called_through, remat_replaced_by
from tfdist.upstream.keras_model import build_by_shapes, flatten_layers


class Call(NamedTuple):
    """One call of a layer.

    Attributes:
        layer: The layer.
        inputs: Numbers of its input tensors; the same tensor has the same number.
        outputs: Numbers of its output tensors.
        rank: The rank of the first input.
        positions: Vectors of channels per example in the output; unknown sizes count as 1.
        output_rank: The rank of the first output.
    """

    layer: keras.Operation
    inputs: list[int]
    outputs: list[int]
    rank: int
    positions: int
    output_rank: int = 0


class Layout(NamedTuple):
    """How the layers of a model are split.

    Attributes:
        splits: The layers that are split, in the order in which they are called.
        following: Layers without weights that may map slices to slices.
        between: Operations that may map parts of the rows to parts of the rows.
        calls: The calls of a forward pass, if known.
        reason_whole: Why no layer is split; None: some may be.
        of: Ids of all layers and variables of the model.
    """

    splits: list[Split]
    following: list[keras.layers.Layer]
    between: list[keras.Operation]
    calls: list[Call]
    reason_whole: str | None
    of: list[int]


def layout(
    model: keras.Model,
    optimizers: Sequence[keras.optimizers.Optimizer],
    num_devices: int,
    rules: Rules | None,
    smallest: int,
    known: Layout | None = None,
) -> Layout:
    """Returns how the layers of a model are split; the same result each time.

    Args:
        model: A built model.
        optimizers: Its optimizers, without a `LossScaleOptimizer` around them.
        num_devices: The number of devices.
        rules: Rules to split by; None: by column, and by row what follows a column.
        smallest: The smallest number of elements of the kernel of a layer that is split.
        known: The model's former layout.

    Raises:
        ConfigurationError: A rule cannot be followed.
    """
    reason, layers = reason_whole(model, optimizers), list(flatten_layers(model))
    of = [*map(id, layers), *map(id, model.variables)]
    if known is not None and (known.reason_whole, known.of) == (reason, of):
        return known
    if reason is not None:
        return Layout([], [], [], [], reason, of)
    calls = calls_of(model)
    order = {id(layer): index for index, layer in reversed(list(enumerate(c.layer for c in calls)))}
    layers.sort(key=lambda layer: order.get(id(layer), len(order)))
    # Keras's RNN, Wrapper and attention layers call their inner ones themselves.
    owners = [layer for layer in layers if type(layer).__module__.startswith("keras.src.layers.")]
    inner = {id(inner) for owner in owners for inner in flatten_layers(owner) if inner is not owner}
    ways = {}
    for layer in layers:
        possible = [w for w in splits.ways(layer, num_devices) if _may_be_cut(w, smallest)]
        if possible and id(layer) not in inner:
            ways[id(layer)] = possible
    chosen = by_rules(ways, rules) if rules is not None else automatic(ways, calls)
    unshared = _without_shared(chosen, layers)
    following = [layer for layer in layers if keeps_parts(layer)]
    operations = {id(o): o for o in [*layers, *(c.layer for c in calls)] if id(o) not in inner}
    between = [operation for operation in operations.values() if computes_by_rows(operation)]
    return Layout(unshared, following, between, calls, None, of)


def _may_be_cut(way: Split, smallest: int) -> bool:
    kernel = way.cuts[0].variable
    others = [cut.variable for cut in way.cuts[1:]]
    return can_be_cut(kernel, smallest) and all(can_be_cut(other, 1) for other in others)


def _without_shared(chosen: Sequence[Split], found: Sequence[keras.layers.Layer]) -> list[Split]:
    """Leaves out layers that share weights with another layer: both would have to agree."""
    owners: dict[int, int] = {}
    for layer in found:
        inner = flatten_layers(layer)
        if len(inner) == 1:
            for variable in layer.variables:
                owners[id(variable)] = owners.get(id(variable), 0) + 1
    return [s for s in chosen if all(owners.get(id(c.variable), 1) == 1 for c in s.cuts)]


# ---- choosing among the ways ----


def automatic(ways: Mapping[int, list[Split]], calls: Sequence[Call]) -> list[Split]:
    """Returns the first way of each layer, or the way by row if all its inputs are slices."""
    kinds: dict[int, str] = {}
    made: dict[int, bool] = {}  # by the number of a tensor: whether it exists in slices
    for call in calls:
        key, from_parts = id(call.layer), [made.get(number, False) for number in call.inputs]
        if key in ways:
            own = ways[key]
            rows = [way for way in own if way.kind == "row"]
            channels_first = getattr(call.layer, "data_format", None) == "channels_first"
            is_last = (
                bool(rows)
                and rows[0].inputs is not None
                and rows[0].inputs.axis % call.rank == (1 if channels_first else call.rank - 1)
            )
            kind = "row" if from_parts and all(from_parts) and is_last else own[0].kind
            kind_of_key = kinds.setdefault(key, kind)
            if kind_of_key != kind:  # called twice, not always on slices
                kinds[key] = ways[key][0].kind
            activation = getattr(call.layer, "activation", None)
            in_parts = kinds[key] in ("column", "channels") and (
                activation is None or activation in ELEMENTWISE
            )
        else:
            in_parts = keeps_parts(call.layer) and from_parts == [True]
        for number in call.outputs:
            made.setdefault(number, in_parts)
    return [
        next(way for way in possible if way.kind == kinds.get(key, possible[0].kind))
        for key, possible in ways.items()
    ]


def by_rules(ways: Mapping[int, list[Split]], rules: Rules) -> list[Split]:
    """Returns the ways that follow the rules; layers that no rule names stay whole.

    Raises:
        ConfigurationError: A rule cannot be followed.
    """
    chosen, used = [], set()
    for possible in ways.values():
        paths = {cut.variable.path: cut for way in possible for cut in way.cuts}
        rule = next((r for r in rules if any(re.search(r, path) for path in paths)), None)
        if rule is None:
            continue
        used.add(rule)
        axes = getattr(rules[rule], "axes", rules[rule])
        split_axes = [index for index, axis in enumerate(axes) if axis is not None]
        if not split_axes:
            continue
        fits = [
            way
            for way in possible
            for cut in way.cuts
            if re.search(rule, cut.variable.path) and split_axes == [cut.division.axis]
        ]
        if not fits:
            can = " or ".join(f"{way.cuts[0].division.axis} ({way.kind})" for way in possible)
            raise ConfigurationError(
                f"layout: {rule!r} cuts axis {', '.join(map(str, split_axes))} of {min(paths)!r}, "
                f"whose layer is split along axis {can} of {possible[0].cuts[0].variable.path!r}."
            )
        chosen.append(fits[0])
    if unused := [rule for rule in rules if rule not in used]:
        names = sorted(possible[0].cuts[0].variable.path for possible in ways.values())
        raise ConfigurationError(
            f"layout: no weight that can be split has a path like {unused[0]!r}; there are "
            f"{', '.join(names[:5]) or 'none'}."
        )
    return chosen


# ---- the forward pass ----


def calls_of(model: keras.Model) -> list[Call]:
    """Returns the calls of a forward pass in the order in which they end, nested layers first.

    Returns no calls if the model has no inputs of known shapes.
    """
    inputs = getattr(model, "inputs", None)
    if not inputs:
        return []
    calls: list[Call] = []
    inside: list[Any] = []
    tensors: list[tf.Tensor] = []  # kept until the end, so that none gets the id of another

    def note(call: Callable[..., Any], operation: Any, *args: Any, **options: Any) -> Any:
        # Keras calls twice for one call; and the result must not keep the model alive.
        if operation is model or (inside and inside[-1] is operation):
            return call(operation, *args, **options)
        inside.append(operation)
        try:
            outputs = call(operation, *args, **options)
        finally:
            inside.pop()
        inputs_read, made = _tensors((args, options)), _tensors(outputs)
        tensors.extend([*inputs_read, *made])
        ranks = [each[0].shape.rank or 0 if each else 0 for each in (inputs_read, made)]
        numbers = [id(tensor) for tensor in inputs_read], [id(tensor) for tensor in made]
        shapes = [list(tensor.shape) for tensor in made if tensor.shape.rank]
        num_positions = max(
            (math.prod(size or 1 for size in shape[1:-1]) for shape in shapes), default=1
        )
        calls.append(Call(operation, *numbers, ranks[0], num_positions, ranks[1]))
        return outputs

    # Keras's own remat takes no keyword arguments in a graph.
    with operations_called_through(note), remat_replaced_by(lambda function: function):
        # A Sequential model has one input, and no structure of inputs.
        build_by_shapes(model, inputs[0] if len(inputs) == 1 else model.input)
    return calls


def _tensors(structure: Any) -> list[tf.Tensor]:
    return [leaf for leaf in keras.tree.flatten(structure) if isinstance(leaf, tf.Tensor)]
