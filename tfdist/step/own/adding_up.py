"""How what a user's step computes from shares adds up to what it computes from the batch.

Nothing tells it from outside: so the step is asked once, on the first batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from tfdist.step import batch_norm
from tfdist.step.aggregation import Aggregation, closest, lost, rounding
from tfdist.step.own.parts import Part, Parts, UnequalPartsError, array
from tfdist.upstream import keras_model

#: How far a part may be off that is computed in less than float32, relative to what is compared.
_OF_16_BITS = 5e-2


@dataclass
class AddingUp:
    """How the parts of a batch make the whole.

    Attributes:
        logs: What the step returns, by name.
        why_whole: Why each replica is given the whole batch; None: it has a share.
        gradients: Of variables, in the order in which the step takes them.
        alike: Those of them that are slices of a table which every share looks up alike, by their
            places: the batch has them once. Slices of other tables are laid end to end.
        states: What the step changes in variables, by their ids.
    """

    logs: dict[str, Aggregation]
    why_whole: str | None = None
    gradients: list[Aggregation] = field(default_factory=list)
    alike: list[frozenset[int]] = field(default_factory=list)
    states: dict[int, Aggregation] = field(default_factory=dict)

    def digest(self) -> float:
        """Returns a number that tells answers apart: workers may read rows of their own."""
        kinds = [*self.logs.items(), *self.gradients, *self.states.values()]
        alike = [sorted(places) for places in self.alike]
        return float(zlib.crc32(repr((self.why_whole is None, kinds, alike)).encode()))


def asked(parts: Parts, num_replicas: int) -> AddingUp:
    """Asks a step how it adds up.

    Args:
        parts: Of its first batch.
        num_replicas: With one, only the names of the logs are asked for.

    Raises:
        UnsupportedModelError: The step cannot be computed on whole batches either.
    """
    whole = parts.whole()
    alone = AddingUp(dict.fromkeys(whole.logs, Aggregation.SAME))
    if num_replicas == 1:
        return alone
    try:
        return _Comparison(parts.model, [*parts.of(whole), whole]).answer()
    except UnequalPartsError as why:
        alone.why_whole = str(why)
        return alone


class _Comparison:
    """Compares two parts with both of them together."""

    def __init__(self, model: keras.Model, parts: Sequence[Part]) -> None:
        self._parts, self._both = parts, parts[2]
        is_precise = model.dtype_policy.compute_dtype in ("float32", "float64")
        self._tolerance = rounding(model) if is_precise else _OF_16_BITS
        self._statistics = {id(v) for x in batch_norm.layers_of(model) for v in x.variables}
        self._metrics = {
            id(v): metric for metric in keras_model.metrics_of(model) for v in metric.variables
        }

    def answer(self) -> AddingUp:
        """Returns how all of it adds up.

        Raises:
            UnequalPartsError: It does not.
        """
        if len({len(part.gradients) for part in self._parts}) > 1:
            raise UnequalPartsError("it takes other gradients for other rows")
        return AddingUp(
            {name: self._log(name) for name in self._both.logs},
            gradients=[self._gradient(i) for i in range(len(self._both.gradients))],
            alike=[self._alike(i) for i in range(len(self._both.gradients))],
            states={key: self._state(key) for key in self._both.scope.assigned},
        )

    def _gradient(self, number: int) -> Aggregation:
        what = f"its gradient number {number}"
        by_variable = zip(*(part.gradients[number] for part in self._parts), strict=True)
        return _one({self._kind(what, v) for v in by_variable if v[2] is not None}, what)

    def _alike(self, number: int) -> frozenset[int]:
        found = set()
        for place, both in self._both.indices[number].items():
            first, second = (part.indices[number].get(place, both[:0]) for part in self._parts[:2])
            if np.array_equal(first, both) and np.array_equal(second, both):
                found.add(place)
            elif len(first) + len(second) != len(both):
                raise UnequalPartsError(f"its gradient number {number} is partly of the same rows")
        return frozenset(found)

    def _log(self, name: str) -> Aggregation:
        value = self._both.logs[name]
        if any(value is result for result in self._both.scope.results):
            return Aggregation.SAME
        what = f"its log {name!r}"
        return _one({self._kind(what, [array(part.logs[name]) for part in self._parts])}, what)

    def _state(self, key: int) -> Aggregation:
        scope = self._both.scope
        variable = scope.assigned[key]
        what = f"the update of {variable.path!r}"
        if not all(key in part.changes for part in self._parts):
            raise UnequalPartsError(f"{what} comes and goes")
        changes = [part.changes[key] for part in self._parts]
        is_same = all(np.array_equal(change, changes[2]) for change in changes)
        is_float = keras.backend.is_float_dtype(variable.dtype)
        if is_same and (key in scope.by_optimizers or not is_float):
            return Aggregation.SAME
        if key in self._statistics:
            return Aggregation.MEAN
        kind = self._kind(what, changes, lost(variable))
        if kind is None and key in self._metrics:
            return self._of_metric(self._metrics[key], what)
        return _one({kind}, what)

    def _of_metric(self, metric: keras.Metric, what: str) -> Aggregation:
        """How a state adds up that does not change here, as none of the batch was right, say."""
        changes = [[part.changes.get(id(v)) for part in self._parts] for v in metric.variables]
        kinds = {self._kind(what, each) for each in changes if each[2] is not None}
        if kinds == {None} and type(metric).__module__.startswith("keras.src."):
            return Aggregation.SUM  # a mean has counted something at least
        return _one(kinds, what)

    def _kind(self, what: str, values: Sequence[Any], slack: float = 0.0) -> Aggregation | None:
        """Returns how values add up; None: nothing is there to add.

        Args:
            what: These are.
            values: Of the first part, the second, and both together.
            slack: How far they may be off, beside what is relative to them.

        Raises:
            UnequalPartsError: They do not.
        """
        first, second, both = values
        if first is None or second is None or not first.shape == second.shape == both.shape:
            raise UnequalPartsError(f"{what} has another shape for other rows")
        weights = [part.num_rows / self._both.num_rows for part in self._parts]
        which, error, size = closest(values, weights)
        if size == 0:
            return None
        if not error <= self._tolerance * size + slack:
            raise UnequalPartsError(f"{what} is neither a mean nor a sum over rows")
        return which


def _one(kinds: set[Aggregation | None], what: str) -> Aggregation:
    """Returns the one way in which all of something adds up."""
    found = [kind for kind in kinds if kind is not None]
    if len(found) == 1:
        return found[0]
    if found:
        raise UnequalPartsError(f"{what} is partly a mean, partly a sum over rows")
    raise UnequalPartsError(f"{what} is zero on the first batch, which does not tell")
