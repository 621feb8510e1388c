"""What becomes of each layer of a model: split, and how, or whole."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras

from tfdist.errors import ConfigurationError
from tfdist.strategies.channel_split import cuts, forward_pass
from tfdist.strategies.channel_split.calls import ELEMENTWISE, keeps_parts
from tfdist.strategies.channel_split.cuts import Split
from tfdist.strategies.channel_split.forward_pass import Call
from tfdist.strategies.sharded import elementwise
from tfdist.upstream.keras_model import flatten_layers

#: By regular expressions on paths of variables: an axis that is not None is the one to cut.
Rules = Mapping[str, Sequence[str | None]]


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
    chosen = _by_rules(ways, rules) if rules is not None else _automatic(ways, calls)
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


def _automatic(ways: Mapping[int, list[Split]], calls: Sequence[Call]) -> list[Split]:
    """Each layer by the first of its ways; by row where all it takes are parts by column."""
    kinds: dict[int, str] = {}
    made: dict[int, bool] = {}  # by the number of a tensor: whether it is there in parts
    for call in calls:
        key, from_parts = id(call.layer), [made.get(number, False) for number in call.inputs]
        if key in ways:
            kind = _next_kind(ways[key], call, all(from_parts) and bool(from_parts))
            known = kinds.setdefault(key, kind)
            if known != kind:  # called twice, not always on parts
                kinds[key] = ways[key][0].kind
            in_parts = kinds[key] in ("column", "channels") and _stays_in_parts(call.layer)
        else:
            in_parts = keeps_parts(call.layer) and from_parts == [True]
        for number in call.outputs:
            made.setdefault(number, in_parts)
    return [
        next(way for way in own if way.kind == kinds.get(key, own[0].kind))
        for key, own in ways.items()
    ]


def _next_kind(own: Sequence[Split], call: Call, from_parts: bool) -> str:
    rows = [way for way in own if way.kind == "row"]
    is_last = bool(rows) and rows[0].inputs is not None and _is_last(rows[0].inputs.axis, call)
    return "row" if from_parts and is_last else own[0].kind


def _is_last(axis: int, call: Call) -> bool:
    first = getattr(call.layer, "data_format", None) == "channels_first"
    return axis % call.rank == (1 if first else call.rank - 1)


def _stays_in_parts(layer: Any) -> bool:
    activation = getattr(layer, "activation", None)
    return activation is None or activation in ELEMENTWISE


def _by_rules(ways: Mapping[int, list[Split]], rules: Rules) -> list[Split]:
    """The ways that cut what the rules say; what none names stays whole."""
    chosen, used = [], set()
    for own in ways.values():
        paths = {cut.variable.path: cut for way in own for cut in way.cuts}
        rule = next((r for r in rules if any(re.search(r, path) for path in paths)), None)
        if rule is None:
            continue
        used.add(rule)
        axes = getattr(rules[rule], "axes", rules[rule])
        wanted = [place for place, axis in enumerate(axes) if axis is not None]
        if not wanted:
            continue
        fits = [
            way
            for way in own
            for cut in way.cuts
            if re.search(rule, cut.variable.path) and wanted == [cut.division.axis]
        ]
        if not fits:
            can = " or ".join(f"{way.cuts[0].division.axis} ({way.kind})" for way in own)
            raise ConfigurationError(
                f"layout: {rule!r} cuts axis {', '.join(map(str, wanted))} of {min(paths)!r}, "
                f"whose layer is split along axis {can} of {own[0].cuts[0].variable.path!r}."
            )
        chosen.append(fits[0])
    if unused := [rule for rule in rules if rule not in used]:
        names = sorted(own[0].cuts[0].variable.path for own in ways.values())
        raise ConfigurationError(
            f"layout: no weight that can be split has a path like {unused[0]!r}; there are "
            f"{', '.join(names[:5]) or 'none'}."
        )
    return chosen


def _without_shared(chosen: Sequence[Split], found: Sequence[keras.layers.Layer]) -> list[Split]:
    """Leaves out layers with weights that another layer has, too: both would have to agree."""
    owners: dict[int, int] = {}
    for layer in found:
        inner = flatten_layers(layer)
        if len(inner) == 1:
            for variable in layer.variables:
                owners[id(variable)] = owners.get(id(variable), 0) + 1
    return [s for s in chosen if all(owners.get(id(c.variable), 1) == 1 for c in s.cuts)]
