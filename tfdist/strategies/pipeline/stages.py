"""The stages of a model: which operation is in which, and what that comes to."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import NamedTuple

import keras

from tfdist.errors import ConfigurationError, UnsupportedModelError, did_you_mean
from tfdist.strategies.pipeline import calls
from tfdist.strategies.pipeline.cut import cut, places


class Costs(NamedTuple):
    """What was found out about the calls of a model.

    Attributes:
        of: `"time"`: in seconds; `"memory"`: in bytes.
        by_stage: Of each call, were it in that stage.
    """

    of: str
    by_stage: list[list[float]]


class Stages(NamedTuple):
    """A model cut into stages.

    Attributes:
        operations: Of each call of a forward pass, in order.
        numbers: The stage of each, from 0.
        num_stages: How many there are.
        costs: Of the calls, where they were measured.
    """

    operations: list[keras.Operation]
    numbers: list[int]
    num_stages: int
    costs: Costs | None = None

    def weights(self) -> list[list[keras.Variable]]:
        """Returns the variables of each stage, each once."""
        found: list[dict[int, keras.Variable]] = [{} for _ in range(self.num_stages)]
        for operation, number in zip(self.operations, self.numbers, strict=True):
            found[number] |= {id(v): v for v in getattr(operation, "variables", [])}
        return [list(own.values()) for own in found]

    def num_parameters(self) -> list[int]:
        """Returns how many numbers the variables of each stage have."""
        return [sum(math.prod(v.shape) for v in own) for own in self.weights()]

    def shares(self) -> list[float] | None:
        """Returns the share of each stage in the time of one device, where that was measured."""
        taken = self._sums("time")
        return taken and [own / sum(taken) for own in taken]

    def num_bytes(self) -> list[float] | None:
        """Returns what each stage holds at most, where that was found out."""
        return self._sums("memory")

    def _sums(self, of: str) -> list[float] | None:
        if self.costs is None or self.costs.of != of:
            return None
        by_stage = [0.0] * self.num_stages
        for call, number in enumerate(self.numbers):
            by_stage[number] += self.costs.by_stage[number][call]
        return by_stage

    def ends(self) -> list[tuple[str, str]]:
        """Returns the names of the first and of the last operation of each stage."""
        named: dict[int, list[str]] = {}
        for operation, number in zip(self.operations, self.numbers, strict=True):
            named.setdefault(number, []).append(operation.name)
        return [(names[0], names[-1]) for _, names in sorted(named.items())]


def into_stages(
    model: keras.Model,
    num_stages: int,
    cut_at: Sequence[str] = (),
    costs: Costs | None = None,
) -> Stages:
    """Cuts a model.

    Args:
        model: Built.
        num_stages: Into how many.
        cut_at: Names of the layers behind which to cut; none: where it is balanced best.
        costs: Of the calls, to balance; None: the numbers of their weights.

    Raises:
        UnsupportedModelError: There are too few places to cut, or a layer would be in two stages.
        ConfigurationError: A name that no layer has.
    """
    calls.check_steps(model)
    operations = calls.of_model(model)
    shared = calls.repeated(operations)
    allowed = places(len(operations), [(first, last) for first, last, _ in shared])
    if cut_at:
        where = [_behind(operations, name, shared) for name in cut_at]
        if sorted(set(where)) != where:
            raise ConfigurationError(
                f"cut_at={','.join(cut_at)}: expected the layers in the order in which the model "
                "calls them, each once."
            )
    else:
        _check_room(operations, num_stages, allowed, shared)
        where = cut(costs.by_stage if costs else [_sizes(operations)] * num_stages, allowed)
    numbers = [bisect.bisect_right(where, place) for place in range(len(operations))]
    return Stages(operations, numbers, num_stages, costs)


def _sizes(operations: Sequence[keras.Operation]) -> list[float]:
    """Numbers in the weights of each call, where a weight counts once; and 1 for the call."""
    seen: set[int] = set()
    sizes = []
    for operation in operations:
        own = {id(v): math.prod(v.shape) for v in getattr(operation, "variables", [])}
        sizes.append(1.0 + sum(size for key, size in own.items() if key not in seen))
        seen |= own.keys()
    return sizes


def _check_room(
    operations: Sequence[keras.Operation],
    num_stages: int,
    allowed: Sequence[int],
    shared: Sequence[tuple[int, int, str]],
) -> None:
    if len(allowed) >= num_stages - 1:
        return
    why = f"it has {len(operations)} calls of layers"
    if shared:
        names = sorted({name for _, _, name in shared})
        more = f" and {len(names) - 3} more" if names[3:] else ""
        why += f", and what shares weights stays in one stage: {', '.join(names[:3])}{more}"
    cure = (
        f"use stages={len(allowed) + 1}" if allowed else "use strategy 'one_device' or 'mirrored'"
    )
    raise UnsupportedModelError(
        f"The model can be cut into {len(allowed) + 1} stages at most, not {num_stages}: {why}; "
        f"{cure}."
    )


def _behind(
    operations: Sequence[keras.Operation], name: str, shared: Sequence[tuple[int, int, str]]
) -> int:
    """Returns the place behind the last call of a layer."""
    found = [place for place, operation in enumerate(operations) if operation.name == name]
    if not found or found[-1] == len(operations) - 1:
        known = [operation.name for operation in operations[:-1]]
        raise ConfigurationError(
            f"cut_at: no layer before the last is called {name!r}.{did_you_mean(name, known)}"
        )
    place = found[-1] + 1
    for first, last, weight in shared:
        if first < place <= last:
            raise UnsupportedModelError(
                f"A cut behind {name!r} would leave {weight} in two stages, for it is used on both "
                f"sides: cut before {operations[first].name!r} or behind {operations[last].name!r}."
            )
    return place
