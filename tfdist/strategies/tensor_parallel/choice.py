"""In which of the ways that there are layers are split: each by itself, or by rules."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.errors import ConfigurationError
from tfdist.strategies.tensor_parallel.following import ELEMENTWISE, keeps_parts
from tfdist.strategies.tensor_parallel.forward_pass import Call
from tfdist.strategies.tensor_parallel.rules import Rules
from tfdist.strategies.tensor_parallel.split import Split


def automatic(ways: Mapping[int, list[Split]], calls: Sequence[Call]) -> list[Split]:
    """Returns of each layer the first of its ways; that by row where all it takes are parts.

    Args:
        ways: In which layers can be split, by their ids, the best first.
        calls: Of a forward pass.
    """
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


def by_rules(ways: Mapping[int, list[Split]], rules: Rules) -> list[Split]:
    """Returns the ways that cut what rules say; what none names stays whole.

    Args:
        ways: As `automatic` takes them.
        rules: Which axes of weights to cut.

    Raises:
        ConfigurationError: A rule that cannot be followed.
    """
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
