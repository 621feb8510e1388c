"""What a training run leaves behind, and how two of them compare."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np

from tests.conformance.case import Case

BOUND = 4e-5


@dataclasses.dataclass(frozen=True)
class Result:
    """What a training run left behind: everything that an engine has to get right."""

    weights: dict[str, np.ndarray]
    history: dict[str, list[float]]
    evaluation: dict[str, float]
    iterations: int
    loss_scale: float | None


@dataclasses.dataclass(frozen=True)
class Difference:
    """One number of a result that is not the reference's.

    Attributes:
        what: which number.
        size: by how much it is off; infinite where there is no such number.
        times: how many times the tolerated difference that is.
    """

    what: str
    size: float
    times: float

    def __str__(self) -> str:
        return f"{self.what}: off by {self.size:.2g}, {self.times:.3g} times what is tolerated"


def compare(result: Result, reference: Result, case: Case) -> list[Difference]:
    """Where a result is not the reference's, the worst first.

    Weights, history, evaluation and loss scale may be off by `BOUND * (1 + |reference|)`, times
    the case's tolerance. Counts of steps may not be off.
    """
    differences = [
        _difference(f"weight {path}", result.weights.get(path), value, case.tolerance)
        for path, value in reference.weights.items()
    ]
    for kind in ("history", "evaluation"):
        found, wanted = getattr(result, kind), getattr(reference, kind)
        differences += [
            _difference(f"{kind} {name}", found.get(name), wanted.get(name), case.tolerance)
            for name in sorted(found.keys() | wanted.keys())
        ]
    if reference.loss_scale is not None:
        differences.append(_difference("loss scale", result.loss_scale, reference.loss_scale, 1.0))
    steps = abs(result.iterations - reference.iterations)
    differences.append(Difference("optimizer steps", steps, np.inf if steps else 0.0))
    return sorted((d for d in differences if d.times > 1.0), key=lambda d: -d.times)


def _difference(what: str, found: Any, wanted: Any, tolerance: float) -> Difference:
    if found is None or wanted is None or np.shape(found) != np.shape(wanted):
        return Difference(f"{what}: {np.shape(found)} for {np.shape(wanted)}", np.inf, np.inf)
    a, b = np.asarray(found, "float64"), np.asarray(wanted, "float64")
    # A NaN is right where the reference has one, and infinitely wrong anywhere else.
    error = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    error = np.nan_to_num(error, nan=np.inf)
    times = error / (tolerance * BOUND * (1.0 + np.abs(np.nan_to_num(b))))
    return Difference(what, float(np.max(error, initial=0)), float(np.max(times, initial=0)))


def collect(model: keras.Model, history: keras.callbacks.History, evaluation: dict) -> Result:
    """Reads a trained model and its logs."""
    scale = getattr(model.optimizer, "dynamic_scale", None)
    # Keras numbers the names of layers through a process: the position tells weights apart.
    weights = {f"{i} {w.name}": _value(w) for i, w in enumerate(model.weights)}
    return Result(
        weights,
        {name: [float(v) for v in values] for name, values in history.history.items()},
        {name: float(value) for name, value in evaluation.items()},
        int(_value(model.optimizer.iterations)),
        None if scale is None else float(_value(scale)),
    )


def _value(variable: Any) -> np.ndarray:
    """A Keras variable or tensor (`iterations` is one under accumulation); the first copy of it."""
    value = getattr(variable, "value", variable)
    return np.asarray(getattr(value, "values", (value,))[0])
