"""How what a user's step computes from shares adds up to what it computes from the batch.

Nothing tells it from outside: so the step is asked once, on the first batch.

The parts of a first batch, each computed by a user's step, to compare them with the whole.

To compare like with like, the parts go on with the gradients and the results of metrics that the
whole has: then all of them find the same weights in a second loss, and in an update of them.

Runs of a user's step that are compared: one is recorded, and others go on with what it took.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.precision import Scaling
from tfdist.step import batch_norm
from tfdist.step.custom_step.scope import CustomStepScope, LocalRun
from tfdist.step.custom_step.trial import StepFn, flat_logs, shaken, tried
from tfdist.step.reductions import Reduction, closest, lost, rounding
from tfdist.strategies import batches
from tfdist.upstream import keras_model

#: How far a part may be off that is computed in less than float32, relative to what is compared.
_OF_16_BITS = 5e-2


@dataclass
class ReductionPlan:
    """How the parts of a batch make the whole.

    Attributes:
        logs: What the step returns, by name.
        full_batch_reason: Why each replica is given the whole batch; None: it has a share.
        gradients: Of variables, in the order in which the step takes them.
        alike: Those of them that are slices of a table which every share looks up alike, by their
            places: the batch has them once. Slices of other tables are laid end to end.
        states: What the step changes in variables, by their ids.
    """

    logs: dict[str, Reduction]
    full_batch_reason: str | None = None
    gradients: list[Reduction] = field(default_factory=list)
    alike: list[frozenset[int]] = field(default_factory=list)
    states: dict[int, Reduction] = field(default_factory=dict)

    def digest(self) -> float:
        """Returns a number that tells answers apart: workers may read rows of their own."""
        kinds = [*self.logs.items(), *self.gradients, *self.states.values()]
        alike = [sorted(places) for places in self.alike]
        return float(zlib.crc32(repr((self.full_batch_reason is None, kinds, alike)).encode()))


def infer_reductions(parts: BatchParts, num_replicas: int) -> ReductionPlan:
    """Asks a step how it adds up.

    Args:
        parts: Of its first batch.
        num_replicas: With one, only the names of the logs are asked for.

    Raises:
        UnsupportedModelError: The step cannot be computed on whole batches either.
    """
    whole = parts.whole()
    alone = ReductionPlan(dict.fromkeys(whole.logs, Reduction.SAME))
    if num_replicas == 1:
        return alone
    try:
        return _Comparison(parts.model, [*parts.of(whole), whole]).answer()
    except NotReducibleError as why:
        alone.full_batch_reason = str(why)
        return alone


class _Comparison:
    """Compares two parts with both of them together."""

    def __init__(self, model: keras.Model, parts: Sequence[BatchPart]) -> None:
        self._parts, self._both = parts, parts[2]
        is_precise = model.dtype_policy.compute_dtype in ("float32", "float64")
        self._tolerance = rounding(model) if is_precise else _OF_16_BITS
        self._statistics = {id(v) for x in batch_norm.layers_of(model) for v in x.variables}
        self._metrics = {
            id(v): metric for metric in keras_model.metrics_of(model) for v in metric.variables
        }

    def answer(self) -> ReductionPlan:
        """Returns how all of it adds up.

        Raises:
            NotReducibleError: It does not.
        """
        if len({len(part.gradients) for part in self._parts}) > 1:
            raise NotReducibleError("it takes other gradients for other rows")
        return ReductionPlan(
            {name: self._log(name) for name in self._both.logs},
            gradients=[self._gradient(i) for i in range(len(self._both.gradients))],
            alike=[self._alike(i) for i in range(len(self._both.gradients))],
            states={key: self._state(key) for key in self._both.scope.assigned},
        )

    def _gradient(self, number: int) -> Reduction:
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
                raise NotReducibleError(f"its gradient number {number} is partly of the same rows")
        return frozenset(found)

    def _log(self, name: str) -> Reduction:
        value = self._both.logs[name]
        if any(value is result for result in self._both.scope.results):
            return Reduction.SAME
        what = f"its log {name!r}"
        return _one({self._kind(what, [array(part.logs[name]) for part in self._parts])}, what)

    def _state(self, key: int) -> Reduction:
        scope = self._both.scope
        variable = scope.assigned[key]
        what = f"the update of {variable.path!r}"
        if not all(key in part.changes for part in self._parts):
            raise NotReducibleError(f"{what} comes and goes")
        changes = [part.changes[key] for part in self._parts]
        is_same = all(np.array_equal(change, changes[2]) for change in changes)
        is_float = keras.backend.is_float_dtype(variable.dtype)
        if is_same and (key in scope.by_optimizers or not is_float):
            return Reduction.SAME
        if key in self._statistics:
            return Reduction.MEAN
        kind = self._kind(what, changes, lost(variable))
        if kind is None and key in self._metrics:
            return self._of_metric(self._metrics[key], what)
        return _one({kind}, what)

    def _of_metric(self, metric: keras.Metric, what: str) -> Reduction:
        """How a state adds up that does not change here, as none of the batch was right, say."""
        changes = [[part.changes.get(id(v)) for part in self._parts] for v in metric.variables]
        kinds = {self._kind(what, each) for each in changes if each[2] is not None}
        if kinds == {None} and type(metric).__module__.startswith("keras.src."):
            return Reduction.SUM  # a mean has counted something at least
        return _one(kinds, what)

    def _kind(self, what: str, values: Sequence[Any], slack: float = 0.0) -> Reduction | None:
        """Returns how values add up; None: nothing is there to add.

        Args:
            what: These are.
            values: Of the first part, the second, and both together.
            slack: How far they may be off, beside what is relative to them.

        Raises:
            NotReducibleError: They do not.
        """
        first, second, both = values
        if first is None or second is None or not first.shape == second.shape == both.shape:
            raise NotReducibleError(f"{what} has another shape for other rows")
        weights = [part.num_rows / self._both.num_rows for part in self._parts]
        which, error, size = closest(values, weights)
        if size == 0:
            return None
        if not error <= self._tolerance * size + slack:
            raise NotReducibleError(f"{what} is neither a mean nor a sum over rows")
        return which


def _one(kinds: set[Reduction | None], what: str) -> Reduction:
    """Returns the one way in which all of something adds up."""
    found = [kind for kind in kinds if kind is not None]
    if len(found) == 1:
        return found[0]
    if found:
        raise NotReducibleError(f"{what} is partly a mean, partly a sum over rows")
    raise NotReducibleError(f"{what} is zero on the first batch, which does not tell")


#: Rows to ask at most, where the step takes less than a batch.
MAX_ROWS = 64


class NotReducibleError(Exception):
    """Raised where the parts of a batch do not make the whole; says what does not."""


@dataclass
class BatchPart:
    """What came of some rows: gradients, indices and changes as NumPy arrays, and the logs.

    Attributes:
        num_rows: How many.
        run: What was asked on the way.
        gradients: Those of variables, in the order in which the step takes them.
        indices: Of those gradients that are slices, by their places.
        changes: By the variables' ids.
        logs: By name, as the step returned them.
        scope: In which it ran.
    """

    num_rows: int
    run: RecordingRun
    gradients: list[list[Any]]
    indices: list[dict[int, np.ndarray]]
    changes: dict[int, np.ndarray]
    logs: dict[str, Any]
    scope: CustomStepScope


@dataclass(frozen=True)
class BatchParts:
    """A step of a model, and its first batch.

    Args:
        model: Built.
        known: All variables that its step may change.
        step: Its `train_step` or `test_step`.
        scalings: Of its optimizers that scale their loss, by id.
        batch: The first global one.
    """

    model: keras.Model
    known: Sequence[keras.Variable]
    step: StepFn
    scalings: dict[int, Scaling]
    batch: Any

    def whole(self) -> BatchPart:
        """Returns what comes of a number of rows that the step takes."""
        rows = int(batches.num_rows(self.batch))
        try:
            return self._part(0, min(rows, MAX_ROWS), RecordingRun(), 1.0)
        except TfdistError:
            raise
        except Exception:
            if rows <= MAX_ROWS:
                raise
            return self._part(0, rows, RecordingRun(), 1.0)  # the number may be written into it

    def of(self, whole: BatchPart) -> list[BatchPart]:
        """Returns the first and the second part of a whole.

        Raises:
            NotReducibleError: The step cannot be asked.
        """
        rows = whole.num_rows
        if whole.run.inner:
            raise NotReducibleError("its loss is made of gradients of weights")
        if rows < 2:
            raise NotReducibleError("the first batch has one row, which does not tell")
        if found := batches.uneven(self.batch):
            raise NotReducibleError(found)
        if any(isinstance(leaf, tf.SparseTensor) for leaf in tf.nest.flatten(self.batch)):
            raise NotReducibleError("its input is sparse")
        try:
            return [
                self._part(*bounds, ReplayRun(whole.run), 0.0)
                for bounds in ((0, rows // 2), (rows // 2, rows))
            ]
        except TfdistError:
            raise
        except Exception as error:
            cause = str(error).strip().splitlines() or [type(error).__name__]
            raise NotReducibleError(f"it fails on a part of the batch ({cause[0]})") from error

    def _part(self, begin: int, end: int, run: RecordingRun, start: float) -> BatchPart:
        """Runs the step on some rows, from metrics of a value."""
        metrics = {id(v) for m in keras_model.metrics_of(self.model) for v in m.variables}
        values = shaken(self.model, self.known, metrics, start)
        rows = batches.take(self.batch, begin, end)
        scope, logs = tried(self.model, self.step, rows, run, self.scalings, values)
        before = {id(v): array(value) for v, value in values}
        changes = {
            key: array(scope.state_mapping[key]) - before[key]
            for key in scope.assigned
            if key in before
        }
        gradients = [[None if g is None else array(g) for g in each] for each in run.taken]
        indices = [
            {i: g.indices.numpy() for i, g in enumerate(each) if isinstance(g, tf.IndexedSlices)}
            for each in run.taken
        ]
        return BatchPart(end - begin, run, gradients, indices, changes, flat_logs(logs), scope)


def array(tensor: Any) -> np.ndarray:
    """Returns a tensor, or slices, as numbers that can be subtracted."""
    tensor = tf.convert_to_tensor(tensor)
    if tensor.dtype.is_floating:
        tensor = tf.cast(tensor, tf.float64)
    elif tensor.dtype.is_bool or tensor.dtype.is_unsigned:
        tensor = tf.cast(tensor, tf.int64)
    return tensor.numpy()


class RecordingRun(LocalRun):
    """The whole: keeps what the step took."""

    def __init__(self) -> None:
        self.inner = False
        self.taken: list[list] = []
        self.results: list[Any] = []

    def gradients(self, compute: Callable[[], list], inner: bool) -> list:
        self.inner |= inner
        self.taken.append(compute())
        return self.taken[-1]

    def result(
        self, scope: CustomStepScope, metric: keras.Metric, compute: Callable[[], Any]
    ) -> Any:
        self.results.append(compute())
        return self.results[-1]


class ReplayRun(RecordingRun):
    """A part: goes on with what was recorded of the whole."""

    def __init__(self, whole: RecordingRun) -> None:
        super().__init__()
        self._whole = whole

    def gradients(self, compute: Callable[[], list], inner: bool) -> list:
        super().gradients(compute, inner)
        return self._whole.taken[len(self.taken) - 1]

    def result(
        self, scope: CustomStepScope, metric: keras.Metric, compute: Callable[[], Any]
    ) -> Any:
        self.results.append(None)
        return self._whole.results[len(self.results) - 1]
