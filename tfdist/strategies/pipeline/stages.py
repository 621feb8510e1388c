"""Splits a model into pipeline stages: the calls of a forward pass, in consecutive runs."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import keras

from tfdist.errors import ConfigurationError, UnsupportedModelError, did_you_mean
from tfdist.upstream.keras_layers import learned_weights, operations_called_by
from tfdist.upstream.keras_optimizers import custom_step_of


class Stages(NamedTuple):
    """A model split into stages.

    Attributes:
        operations: The operation of each call of a forward pass, in order.
        numbers: The stage of each call, from 0.
        num_stages: The number of stages.
        costs: For each stage, the bytes of every call if it were in that stage; None: unknown.
    """

    operations: list[keras.Operation]
    numbers: list[int]
    num_stages: int
    costs: list[list[float]] | None = None

    def weights(self) -> list[list[keras.Variable]]:
        """Returns the variables that each stage stores: those that it is the first to read."""
        by_stage: list[list[keras.Variable]] = [[] for _ in range(self.num_stages)]
        seen = set[int]()
        for operation, number in zip(self.operations, self.numbers, strict=True):
            for variable in getattr(operation, "variables", []):
                if id(variable) not in seen:
                    seen.add(id(variable))
                    by_stage[number].append(variable)
        return by_stage

    def stages_of_calls(self) -> dict[keras.Operation, list[int]]:
        """Returns the stages of the calls of each operation, in order."""
        stages: dict[keras.Operation, list[int]] = {}
        for operation, number in zip(self.operations, self.numbers, strict=True):
            stages.setdefault(operation, []).append(number)
        return stages

    def shared_weights(self) -> dict[str, list[int]]:
        """Returns the stages that read a weight, by its path, if they are several."""
        by_path: dict[str, set[int]] = {}
        for operation, number in zip(self.operations, self.numbers, strict=True):
            for variable in getattr(operation, "variables", []):
                by_path.setdefault(variable.path, set()).add(number)
        return {path: sorted(readers) for path, readers in by_path.items() if len(readers) > 1}

    def num_parameters(self) -> list[int]:
        """Returns the number of elements of each stage's variables."""
        return [sum(math.prod(v.shape) for v in variables) for variables in self.weights()]

    def num_bytes(self) -> list[float] | None:
        """Returns the largest number of bytes that each stage holds; None if not estimated."""
        if self.costs is None:
            return None
        by_stage = [0.0] * self.num_stages
        for call, number in enumerate(self.numbers):
            by_stage[number] += self.costs[number][call]
        return by_stage

    def ends(self) -> list[tuple[str, str]]:
        """Returns the names of the first and the last operation of each stage."""
        named: dict[int, list[str]] = {}
        for operation, number in zip(self.operations, self.numbers, strict=True):
            named.setdefault(number, []).append(operation.name)
        return [(names[0], names[-1]) for _, names in sorted(named.items())]


def into_stages(
    model: keras.Model,
    num_stages: int,
    cut_at: Sequence[str] = (),
    costs: list[list[float]] | None = None,
) -> Stages:
    """Splits a model into stages.

    Calls that share a weight stay in one stage if there are enough other places to split.

    Args:
        model: A built model.
        num_stages: The number of stages.
        cut_at: Names of the layers after which a stage ends; empty: choose balanced stages.
        costs: For each stage, the cost of every call if it were in that stage; None: balance the
            number of parameters.

    Raises:
        UnsupportedModelError: The model has too few places to split, or two stages would have to
            update the state of a layer.
        ConfigurationError: No layer has a name of `cut_at`, or they are out of order.
    """
    check_no_custom_step(model)
    operations = calls_of_model(model)
    shared = shared_spans(operations, of_state=True)
    if cut_at:
        where = [_place_after(operations, name, shared) for name in cut_at]
        if sorted(set(where)) != where:
            raise ConfigurationError(
                f"cut_at={','.join(cut_at)}: expected the layers in the order in which the model "
                "calls them, each once."
            )
    else:
        for spans in (shared_spans(operations), shared):
            allowed = cut_places(len(operations), [span[:2] for span in spans])
            if len(allowed) >= num_stages - 1:
                break
        else:
            why = f"it has {len(operations)} calls of layers"
            if shared:
                names = sorted({name for _, _, name in shared})
                more = f" and {len(names) - 3} more" if names[3:] else ""
                first = ", ".join(names[:3])
                why += f", and calls that share state stay in one stage: {first}{more}"
            most = len(allowed) + 1
            cure = f"use stages={most}" if allowed else "use strategy 'sharded' or 'mirrored'"
            raise UnsupportedModelError(
                f"The model can be split into {most} stages at most, not {num_stages}: {why}; "
                f"{cure}."
            )
        costs_by_stage = costs or [_num_elements(operations)] * num_stages
        where = balanced_cuts(costs_by_stage, allowed)
    numbers = [bisect.bisect_right(where, index) for index in range(len(operations))]
    return Stages(operations, numbers, num_stages, costs)


# ---- the calls of a model ----


def calls_of_model(model: keras.Model) -> list[keras.Operation]:
    """Returns the operation of each call of a forward pass, including those of nested models.

    A nested model that runs its own code counts as one operation, in one stage.

    Raises:
        UnsupportedModelError: The model itself runs its own code.
    """
    called = operations_called_by(model)
    if called is None:
        raise UnsupportedModelError(
            "strategy 'pipeline' splits Functional and Sequential models, but "
            f"{type(model).__name__} is called by code of its own: build it with "
            "keras.Model(inputs, outputs), or use strategy 'mirrored'."
        )
    operations: list[keras.Operation] = []
    for operation in called:
        if isinstance(operation, keras.Model) and operations_called_by(operation) is not None:
            operations += calls_of_model(operation)
        else:
            operations.append(operation)
    return operations


def check_no_custom_step(model: keras.Model) -> None:
    """Refuses a model with a custom step.

    Raises:
        UnsupportedModelError: The model has one.
    """
    for training in (True, False):
        if (step := custom_step_of(model, training)) is not None:
            raise refused_custom_step(step)


def refused_custom_step(step: str) -> UnsupportedModelError:
    """Returns the error for a custom step, such as `"MyModel.train_step"`."""
    return UnsupportedModelError(
        "strategy 'pipeline' orders the forward and backward passes of its stages itself, "
        f"but {step} makes a custom step: override compute_loss instead, or use strategy "
        "'mirrored'."
    )


def shared_spans(
    calls: Sequence[keras.Operation], of_state: bool = False
) -> list[tuple[int, int, str]]:
    """Returns the spans between calls of the same layer, or of layers that share a weight.

    Args:
        calls: The operation of each call.
        of_state: Whether to return only spans that cannot be split, because they share what calls
            update, such as the moving statistics of BatchNorm. Several stages can read a weight.

    Returns:
        The first and the last call of each span, and the name of what they share.
    """
    seen: dict[int, tuple[int, int, str]] = {}
    for index, operation in enumerate(calls):
        weights = {id(v) for v in learned_weights(operation)} if of_state else set()
        variables = getattr(operation, "variables", [])
        shared = [(id(v), v.path) for v in variables if id(v) not in weights]
        if not of_state and not shared:
            shared = [(id(operation), operation.name)]
        for key, name in shared:
            first, _, shared_name = seen.get(key, (index, index, name))
            seen[key] = (first, index, shared_name)
    return [span for span in seen.values() if span[0] < span[1]]


def _num_elements(operations: Sequence[keras.Operation]) -> list[float]:
    """Returns the elements of each call's weights, plus 1; a shared weight counts once."""
    seen: set[int] = set()
    sizes = []
    for operation in operations:
        elements = {id(v): math.prod(v.shape) for v in getattr(operation, "variables", [])}
        sizes.append(1.0 + sum(size for key, size in elements.items() if key not in seen))
        seen |= elements.keys()
    return sizes


# ---- where to cut ----


def cut_places(length: int, spans: Iterable[tuple[int, int]]) -> list[int]:
    """Returns the places where a chain may be cut, each the index of the first element after it."""
    closed = {index for first, last in spans for index in range(first + 1, last + 1)}
    return [index for index in range(1, length) if index not in closed]


def balanced_cuts(costs: Sequence[Sequence[float]], allowed: Sequence[int]) -> list[int]:
    """Returns the cuts of a chain into runs that minimize the cost of the most expensive run.

    This is the recurrence of the linear partition problem (Skiena, "The Algorithm Design Manual",
    section 8.5).

    Args:
        costs: For each run, the non-negative cost of every element if it were in that run.
        allowed: Places where a cut is allowed, ascending.

    Raises:
        ValueError: There are fewer places than cuts.
    """
    num_runs = len(costs)
    if len(allowed) < num_runs - 1:
        raise ValueError(f"{num_runs} runs need {num_runs - 1} cuts, of {len(allowed)} places")
    ends = [0, *allowed, len(costs[0])]
    first = [0.0, *itertools.accumulate(costs[0])]
    # By index into `ends`: the most expensive run up to there, and the cuts before.
    best: list[tuple[float, list[int]]] = [(first[end], []) for end in ends]
    for run, cost_of_run in enumerate(costs[1:], 1):
        sums = [0.0, *itertools.accumulate(cost_of_run)]
        best = [
            min(
                (
                    (max(best[j][0], sums[ends[i]] - sums[ends[j]]), [*best[j][1], ends[j]])
                    for j in range(run, i)
                ),
                default=(float("inf"), []),
            )
            for i in range(len(ends))
        ]
    return best[-1][1]


def _place_after(
    operations: Sequence[keras.Operation], name: str, shared: Sequence[tuple[int, int, str]]
) -> int:
    """Returns the place after the last call of a layer."""
    calls = [index for index, operation in enumerate(operations) if operation.name == name]
    if not calls or calls[-1] == len(operations) - 1:
        names = [operation.name for operation in operations[:-1]]
        raise ConfigurationError(
            f"cut_at: no layer before the last is called {name!r}.{did_you_mean(name, names)}"
        )
    index = calls[-1] + 1
    for first, last, weight in shared:
        if first < index <= last:
            raise UnsupportedModelError(
                f"A cut after {name!r} would leave {weight} in two stages, because it is used on "
                f"both sides: cut before {operations[first].name!r} or after "
                f"{operations[last].name!r}."
            )
    return index
