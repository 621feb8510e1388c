"""What becomes of each layer of a model: split, and how, or whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import keras

from tfdist.strategies.sharded import elementwise
from tfdist.strategies.tensor_parallel import choice, cuts, forward_pass
from tfdist.strategies.tensor_parallel.following import keeps_parts
from tfdist.strategies.tensor_parallel.forward_pass import Call
from tfdist.strategies.tensor_parallel.rules import Rules
from tfdist.strategies.tensor_parallel.split import Split
from tfdist.upstream.keras_model import flatten_layers


class Layout(NamedTuple):
    """The layers of a model.

    Attributes:
        splits: How those are split that are, in the order in which they are called.
        following: Layers without weights that may make parts of parts.
        calls: Of a forward pass, where it is known.
        why_whole: Why no layer is split; None: some may be.
        of: Ids of all layers and variables.
    """

    splits: list[Split]
    following: list[keras.layers.Layer]
    calls: list[Call]
    why_whole: str | None
    of: list[int]


def layout(
    model: keras.Model,
    optimizers: Sequence[keras.optimizers.Optimizer],
    num_devices: int,
    rules: Rules | None,
    smallest: int,
    known: Layout | None = None,
) -> Layout:
    """Returns what becomes of a model's layers; the same whenever it is asked.

    Args:
        model: Built.
        optimizers: Its own, without the `LossScaleOptimizer` around one.
        num_devices: To split over.
        rules: By which to split; None: by column, and by row what follows a column.
        smallest: Numbers in a kernel from which on a layer is split.
        known: What became of the model's layers before.

    Raises:
        ConfigurationError: A rule that cannot be followed.
    """
    why_whole, found = elementwise.why_whole(model, optimizers), list(flatten_layers(model))
    of = [*map(id, found), *map(id, model.variables)]
    if known is not None and (known.why_whole, known.of) == (why_whole, of):
        return known
    if why_whole is not None:
        return Layout([], [], [], why_whole, of)
    calls = forward_pass.calls_of(model)
    order = {id(layer): place for place, layer in reversed(list(enumerate(c.layer for c in calls)))}
    found.sort(key=lambda layer: order.get(id(layer), len(order)))
    inner = _inside_kerass_own(found)
    ways = {}
    for layer in found:
        own = [w for w in cuts.ways(layer, num_devices) if _may_be_cut(w, smallest)]
        if own and id(layer) not in inner:
            ways[id(layer)] = own
    chosen = choice.by_rules(ways, rules) if rules is not None else choice.automatic(ways, calls)
    splits = _without_shared(chosen, found)
    return Layout(splits, [layer for layer in found if keeps_parts(layer)], calls, None, of)


def _inside_kerass_own(found: Sequence[keras.layers.Layer]) -> set[int]:
    """The ids of layers that layers of Keras (RNN, Wrapper, attention) call in their own ways."""
    owners = [layer for layer in found if type(layer).__module__.startswith("keras.src.layers.")]
    return {id(inner) for owner in owners for inner in flatten_layers(owner) if inner is not owner}


def _may_be_cut(way: Split, smallest: int) -> bool:
    kernel = way.cuts[0].variable
    others = [cut.variable for cut in way.cuts[1:]]
    return elementwise.can_be_cut(kernel, smallest) and all(
        elementwise.can_be_cut(other, 1) for other in others
    )


def _without_shared(chosen: Sequence[Split], found: Sequence[keras.layers.Layer]) -> list[Split]:
    """Leaves out layers with weights that another layer has, too: both would have to agree."""
    owners: dict[int, int] = {}
    for layer in found:
        inner = flatten_layers(layer)
        if len(inner) == 1:
            for variable in layer.variables:
                owners[id(variable)] = owners.get(id(variable), 0) + 1
    return [s for s in chosen if all(owners.get(id(c.variable), 1) == 1 for c in s.cuts)]
