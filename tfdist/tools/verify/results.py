"""The results of a training run, and the differences of two results. Imports no TensorFlow."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

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
    found = []
    for field in ("weights", "optimizer", "history", "evaluation"):
        ours, theirs, kind = getattr(result, field), getattr(reference, field), field.rstrip("s")
        found += [
            _difference(f"{kind} {name}", ours.get(name), theirs.get(name), tolerance)
            for name in sorted(ours.keys() | theirs.keys())
        ]
    steps = abs(result.iterations - reference.iterations)
    found.append(Difference("optimizer steps", steps, np.inf if steps else 0.0))
    return sorted(found, key=lambda d: -d.times)


def _difference(what: str, found: Any, expected: Any, tolerance: float) -> Difference:
    if found is None or expected is None or np.shape(found) != np.shape(expected):
        return Difference(f"{what}: {np.shape(found)} for {np.shape(expected)}", np.inf, np.inf)
    a, b = np.asarray(found, "float64"), np.asarray(expected, "float64")
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
    """Returns the values of a metric, one per epoch; each is a number or a list by class."""
    return np.asarray(values, "float64").tolist()
