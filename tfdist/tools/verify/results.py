"""The results of a training run, their differences, and the verdict. Imports no TensorFlow."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tfdist.errors import MissingError, TfdistError, TooFewDevicesError

if TYPE_CHECKING:
    import keras


#: Tolerance for rounding, absolute and relative.
TOLERANCE = 4e-5


@dataclasses.dataclass(frozen=True)
class Result:
    """All results of a training run that a strategy has to reproduce."""

    weights: dict[str, np.ndarray]
    optimizer: dict[str, np.ndarray]
    history: dict[str, list[float]]
    evaluation: dict[str, float]
    iterations: int


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference between a value and its reference.

    Attributes:
        what: Name of the value.
        size: Largest absolute difference; infinite if the value is missing.
        times: The difference divided by the tolerance.
    """

    what: str
    size: float
    times: float

    def __str__(self) -> str:
        return f"{self.what}: off by {self.size:.2g}, {self.times:.3g} times the tolerance"


def differences(result: Result, reference: Result, tolerance: float = 1.0) -> list[Difference]:
    """Returns the difference of each value of a result, the largest first.

    The tolerance is `tolerance * TOLERANCE * (1 + |reference|)`. Step counts must be equal.
    """
    unsorted = []
    for field in ("weights", "optimizer", "history", "evaluation"):
        ours, theirs, kind = getattr(result, field), getattr(reference, field), field.rstrip("s")
        unsorted += [
            _difference(f"{kind} {name}", ours.get(name), theirs.get(name), tolerance)
            for name in sorted(ours.keys() | theirs.keys())
        ]
    steps = abs(result.iterations - reference.iterations)
    unsorted.append(Difference("optimizer steps", steps, np.inf if steps else 0.0))
    return sorted(unsorted, key=lambda d: -d.times)


def _difference(what: str, actual: Any, expected: Any, tolerance: float) -> Difference:
    if actual is None or expected is None or np.shape(actual) != np.shape(expected):
        return Difference(f"{what}: {np.shape(actual)} for {np.shape(expected)}", np.inf, np.inf)
    a, b = np.asarray(actual, "float64"), np.asarray(expected, "float64")
    # NaN is correct if the reference is NaN, and otherwise an infinite error.
    error = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    error = np.nan_to_num(error, nan=np.inf)
    times = error / (tolerance * TOLERANCE * (1.0 + np.abs(np.nan_to_num(b))))
    return Difference(what, float(np.max(error, initial=0)), float(np.max(times, initial=0)))


def collect(model: keras.Model, history: keras.callbacks.History, evaluation: dict) -> Result:
    """Returns the result of a trained model and its logs."""
    # The numbers in Keras's layer names depend on the process, so identify weights by position.
    weights = {f"{i} {w.name}": np.asarray(w) for i, w in enumerate(model.weights)}
    optimizer = {
        f"variable {i}": np.asarray(v)
        for i, v in enumerate(model.optimizer.variables)
        # Replicas accumulate gradients themselves: see `step.accumulation`.
        if not v.name.endswith("gradient_accumulator")
    }
    return Result(
        weights,
        optimizer,
        {name: _numbers(values) for name, values in history.history.items()},
        {name: _numbers(value) for name, value in evaluation.items()},
        int(np.asarray(model.optimizer.iterations)),
    )


def _numbers(values: Any) -> Any:
    return np.asarray(values, "float64").tolist()


class Verdict(NamedTuple):
    """The result of a trial, which is the same on every worker.

    Attributes:
        strategy: Name of the strategy.
        num_workers: Number of processes.
        num_replicas: Number of replicas in all processes.
        differences: Differences from plain Keras on this worker, the largest first.
        differing: Ranks that differ from plain Keras by more than the tolerance.
        inconsistent: Ranks with weights that are not bitwise identical to those of rank 0.
    """

    strategy: str
    num_workers: int
    num_replicas: int
    differences: list[Difference]
    differing: list[int]
    inconsistent: list[int]

    @property
    def passed(self) -> bool:
        """Whether the strategy matches one device."""
        return not self.differing and not self.inconsistent


#: Verdicts by strategy, or the error that prevented the trial.
Outcomes = Mapping[str, Verdict | TfdistError]

_MAX_LINES = 5


def healthy(outcome: Verdict | TfdistError) -> bool:
    """Returns whether a strategy passed, or could not run for want of a package or of devices."""
    if isinstance(outcome, Verdict):
        return outcome.passed
    return isinstance(outcome, (MissingError, TooFewDevicesError))


def as_text(name: str, outcome: Verdict | TfdistError) -> str:
    """Returns `PASS`, `FAIL` or `NONE` with the reason."""
    if isinstance(outcome, TfdistError):
        return f"{'NONE' if healthy(outcome) else 'FAIL'} {name}: {outcome}"
    worst = outcome.differences[0]
    head = f"{name}, {outcome.num_replicas} replica{'s' if outcome.num_replicas > 1 else ''}"
    if outcome.num_workers > 1:
        head += f" in {outcome.num_workers} processes"
    if outcome.passed:
        return (
            f"PASS {head}: matches plain Keras on one device; largest difference {worst.size:.1e} "
            f"({worst.what}; tolerance {TOLERANCE:.0e})"
        )
    lines = [f"FAIL {head}"]
    if outcome.differing:
        lines.append(f"differs from plain Keras on one device, on {_ranks(outcome.differing)}:")
        lines += [str(d) for d in outcome.differences[:_MAX_LINES] if d.times > 1.0]
    if outcome.inconsistent:
        lines.append(
            f"weights are not bitwise identical to those of rank 0, on "
            f"{_ranks(outcome.inconsistent)}"
        )
    return "\n     ".join(lines)


def as_json(outcomes: Outcomes) -> str:
    """Returns `{"passed": ..., "strategies": {name: ...}}`; an infinite difference is null."""
    strategies = {name: _as_dict(outcome) for name, outcome in outcomes.items()}
    return json.dumps(
        {"passed": all(map(healthy, outcomes.values())), "strategies": strategies}, indent=2
    )


def _as_dict(outcome: Verdict | TfdistError) -> dict:
    if isinstance(outcome, TfdistError):
        return {"passed": None if healthy(outcome) else False, "error": str(outcome)}
    numbers = [
        {
            "what": d.what,
            "size": d.size if math.isfinite(d.size) else None,
            "times_tolerated": d.times if math.isfinite(d.times) else None,
        }
        for d in outcome.differences
    ]
    return {"passed": outcome.passed} | outcome._asdict() | {"differences": numbers}


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
