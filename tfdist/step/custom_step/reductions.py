"""Reduction inference for custom steps.

Whether the values that a custom step computes are a mean or a sum over rows is inferred once. The
static analysis of the traced step (`traced_step.py`) decides that where it knows all operations.
What it does not know is probed: the step is run on both halves of some rows, and on all of them, at
several perturbations of the weights and of the first batch.

To compare like with like, the runs on the halves continue with the gradients and metrics' results
of the run on all rows. So all runs have the same weights when they compute a second loss, and a
second update.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.precision import Scaling
from tfdist.step import batch_norm, perturbation
from tfdist.step.custom_step.scope import CustomStepScope, LocalRun
from tfdist.step.custom_step.traced_step import NotReducibleError, TracedStep
from tfdist.step.custom_step.trial import StepFn, flat_logs, try_step
from tfdist.step.probes import MAX_ROWS, closest, rounding, rounding_of_change
from tfdist.step.reductions import DECISIONS, Reduction
from tfdist.strategies import batches
from tfdist.upstream import keras_model

logger = logging.getLogger(__name__)

#: Perturbations, besides the first, at which the reductions have to be the same.
_FURTHER = (2,)

#: Relative tolerance for values that are computed in less than float32.
_16_BIT_TOLERANCE = 5e-2


@dataclass
class ReductionPlan:
    """The reductions of everything that a custom step computes.

    Attributes:
        logs: Those of the step's results, by name.
        full_batch_reason: Why every replica computes the full batch; None if each computes its
            own part of it.
        gradients: Those of gradients, in the order in which the step computes them.
        alike: For each gradient, the places of variables for which all replicas look up the same
            rows, so that the batch has these slices once. Other slices are concatenated.
        states: Those of the changes of variables, by id.
    """

    logs: dict[str, Reduction]
    full_batch_reason: str | None = None
    gradients: list[Reduction] = field(default_factory=list)
    alike: list[frozenset[int]] = field(default_factory=list)
    states: dict[int, Reduction] = field(default_factory=dict)

    def digest(self) -> float:
        """Returns a checksum, to compare the plans of workers, which may have different rows."""
        kinds = [*self.logs.items(), *self.gradients, *self.states.values()]
        alike = [sorted(places) for places in self.alike]
        return float(zlib.crc32(repr((self.full_batch_reason is None, kinds, alike)).encode()))


def infer_reductions(parts: BatchParts, num_replicas: int) -> ReductionPlan:
    """Infers the reductions of a step, at several perturbations of its weights and first batch.

    Args:
        parts: The step and its first batch.
        num_replicas: With one replica, only the names of the logs are needed.

    Raises:
        UnsupportedModelError: The step is not supported in full-batch mode either.
    """
    whole = parts.whole()
    full_batch = ReductionPlan(dict.fromkeys(whole.logs, Reduction.SAME))
    if num_replicas == 1:
        return full_batch
    try:
        parts.check(whole)
        traced = parts.traced()
        if (plan := _plan_of_analysis(parts.model, whole, traced)) is not None:
            return plan
        DECISIONS["probe"] += 1
        plan = _Comparison(parts.model, [*parts.of(whole), whole], traced).plan()
        for number in _FURTHER:
            _confirm(plan, parts, number, traced)
        return plan
    except NotReducibleError as reason:
        full_batch.full_batch_reason = str(reason)
        return full_batch


def _plan_of_analysis(
    model: keras.Model, whole: BatchPart, traced: TracedStep | None
) -> ReductionPlan | None:
    """Returns the plan if the analysis decides it all, so that there is nothing to probe."""
    if traced is None or any(whole.indices):
        return None
    statistics = _statistics_of(model)
    results = {id(result) for result in whole.scope.results}
    logs = {n: Reduction.SAME if id(v) in results else traced.log(n) for n, v in whole.logs.items()}
    gradients = [traced.gradient(number) for number in range(len(whole.gradients))]
    states = {
        key: Reduction.MEAN if key in statistics else traced.state(variable)
        for key, variable in whole.scope.assigned.items()
    }
    known_logs = {name: kind for name, kind in logs.items() if kind}
    known_gradients = [kind for kind in gradients if kind]
    known_states = {key: kind for key, kind in states.items() if kind}
    known = [*known_logs.values(), *known_gradients, *known_states.values()]
    if len(known) < len(logs) + len(gradients) + len(states):
        return None
    alike: list[frozenset[int]] = [frozenset()] * len(gradients)
    return ReductionPlan(known_logs, None, known_gradients, alike, known_states)


def _statistics_of(model: keras.Model) -> set[int]:
    """Returns the ids of the variables of BatchNormalization, each replica's own by definition."""
    return {id(v) for layer in batch_norm.layers_of(model) for v in layer.variables}


def _confirm(
    plan: ReductionPlan, parts: BatchParts, number: int, traced: TracedStep | None
) -> None:
    """Compares a plan with that for a perturbation of weights and batch.

    Raises:
        NotReducibleError: The reductions are others.
    """
    perturbed = replace(
        parts, batch=perturbation.batch(batches.take(parts.batch, 0, MAX_ROWS), number),
        number=number,
    )  # fmt: skip
    try:
        whole = perturbed.whole()
        runs = [*perturbed.of(whole), whole]
    except Exception as error:
        logger.info("The step takes no perturbed batch: %s", error)
        return
    if all(run.is_finite for run in runs):
        other = _Comparison(parts.model, runs, traced).plan()
        if other.digest() != plan.digest():
            raise NotReducibleError("its reductions depend on the weights or the rows")


class _Comparison:
    """Compares the runs on two parts with the run on both of them together.

    Args:
        model: A built model.
        parts: The runs.
        traced: The traced step, whose analysis has precedence; None if it cannot be traced.
    """

    def __init__(
        self, model: keras.Model, parts: Sequence[BatchPart], traced: TracedStep | None
    ) -> None:
        self._parts, self._both, self._traced = parts, parts[2], traced
        is_precise = model.dtype_policy.compute_dtype in ("float32", "float64")
        self._tolerance = rounding(model) if is_precise else _16_BIT_TOLERANCE
        self._statistics = _statistics_of(model)
        self._metrics = {
            id(v): metric for metric in keras_model.metrics_of(model) for v in metric.variables
        }

    def plan(self) -> ReductionPlan:
        """Returns the reductions.

        Raises:
            NotReducibleError: A value is neither a mean nor a sum.
        """
        if len({len(part.gradients) for part in self._parts}) > 1:
            raise NotReducibleError("it computes other gradients for other rows")
        return ReductionPlan(
            {name: self._log(name) for name in self._both.logs},
            gradients=[self._gradient(i) for i in range(len(self._both.gradients))],
            alike=[self._alike(i) for i in range(len(self._both.gradients))],
            states={key: self._state(key) for key in self._both.scope.assigned},
        )

    def _gradient(self, number: int) -> Reduction:
        if self._traced and (kind := self._traced.gradient(number)):
            return kind
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
                raise NotReducibleError(
                    f"its gradient number {number} looks up the same rows in part"
                )
        return frozenset(found)

    def _log(self, name: str) -> Reduction:
        value = self._both.logs[name]
        if any(value is result for result in self._both.scope.results):
            return Reduction.SAME
        if self._traced and (kind := self._traced.log(name)):
            return kind
        what = f"its log {name!r}"
        return _one({self._kind(what, [array(part.logs[name]) for part in self._parts])}, what)

    def _state(self, key: int) -> Reduction:
        scope = self._both.scope
        variable = scope.assigned[key]
        what = f"the update of {variable.path!r}"
        if not all(key in part.changes for part in self._parts):
            raise NotReducibleError(f"{what} does not happen for all rows")
        if key in self._statistics:
            return Reduction.MEAN
        if self._traced and (kind := self._traced.state(variable)):
            return kind
        changes = [part.changes[key] for part in self._parts]
        is_same = all(np.array_equal(change, changes[2]) for change in changes)
        is_float = keras.backend.is_float_dtype(variable.dtype)
        if is_same and (key in scope.by_optimizers or not is_float):
            return Reduction.SAME
        kind = self._kind(what, changes, rounding_of_change(variable))
        if kind is None and key in self._metrics:
            return self._of_metric(self._metrics[key], what)
        return _one({kind}, what)

    def _of_metric(self, metric: keras.Metric, what: str) -> Reduction:
        """Infers the reduction of a state that does not change on the first batch."""
        changes = [[part.changes.get(id(v)) for part in self._parts] for v in metric.variables]
        kinds = {self._kind(what, each) for each in changes if each[2] is not None}
        if kinds == {None} and type(metric).__module__.startswith("keras.src."):
            return Reduction.SUM  # a mean would have changed its count
        return _one(kinds, what)

    def _kind(self, what: str, values: Sequence[Any], slack: float = 0.0) -> Reduction | None:
        """Returns the reduction of values; None if all are zero.

        Args:
            what: Name of the values, for messages.
            values: Those of the first part, the second, and both together.
            slack: Absolute tolerance, in addition to the relative one.

        Raises:
            NotReducibleError: They are neither a mean nor a sum.
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
    """Returns the one reduction that all parts of a value have."""
    found = [kind for kind in kinds if kind is not None]
    if len(found) == 1:
        return found[0]
    if found:
        raise NotReducibleError(f"{what} is partly a mean, partly a sum over rows")
    raise NotReducibleError(f"{what} is zero on the first batch, so it cannot be inferred")


@dataclass
class BatchPart:
    """The results of a step for some rows, as NumPy arrays.

    Attributes:
        num_rows: Number of rows.
        run: The recorded run.
        gradients: Gradients of variables, in the order in which the step computes them.
        indices: Indices of the gradients that are `tf.IndexedSlices`, by place.
        changes: Changes of variables, by id.
        logs: Results of the step, by name.
        scope: The scope in which it ran.
    """

    num_rows: int
    run: RecordingRun
    gradients: list[list[Any]]
    indices: list[dict[int, np.ndarray]]
    changes: dict[int, np.ndarray]
    logs: dict[str, Any]
    scope: CustomStepScope

    @property
    def is_finite(self) -> bool:
        """Whether all gradients and changes are finite."""
        found = [g for each in self.gradients for g in each if g is not None]
        return all(np.isfinite(value).all() for value in [*found, *self.changes.values()])


@dataclass(frozen=True)
class BatchParts:
    """A custom step and its first batch, to run the step on parts of it.

    Args:
        model: A built model.
        known: All variables that its step may change.
        step: Its `train_step` or `test_step`.
        scalings: The scaling of each optimizer that scales its loss, by id.
        batch: The first global batch.
        number: Number of the perturbation of the weights.
    """

    model: keras.Model
    known: Sequence[keras.Variable]
    step: StepFn
    scalings: dict[int, Scaling]
    batch: Any
    number: int = 1

    def whole(self) -> BatchPart:
        """Returns the results for as many rows as the step accepts."""
        rows = int(batches.num_rows(self.batch))
        try:
            return self._part(0, min(rows, MAX_ROWS), RecordingRun(), 1.0)
        except TfdistError:
            raise
        except Exception as error:
            if rows <= MAX_ROWS:
                raise
            logger.info(
                "The step does not run on %d rows (%s): probing the batch.", MAX_ROWS, error
            )
            return self._part(0, rows, RecordingRun(), 1.0)  # the batch size may be hard-coded

    def check(self, whole: BatchPart) -> None:
        """Checks that replicas can compute the step on their rows.

        Raises:
            NotReducibleError: They cannot.
        """
        if whole.run.inner:
            raise NotReducibleError("its loss contains gradients of weights")
        if found := batches.uneven(self.batch):
            raise NotReducibleError(found)
        if any(isinstance(leaf, tf.SparseTensor) for leaf in tf.nest.flatten(self.batch)):
            raise NotReducibleError("its input is sparse")

    def traced(self) -> TracedStep | None:
        """Returns the traced step; None if it cannot be analyzed."""
        try:
            return TracedStep(self.model, self.known, self.step, self.scalings, self.batch)
        except ValueError as error:
            logger.info("No static analysis of the step: %s", error)
            return None

    def of(self, whole: BatchPart) -> list[BatchPart]:
        """Returns the results for the first and the second half of the rows.

        Raises:
            NotReducibleError: The step cannot be run on them.
        """
        rows = whole.num_rows
        if rows < 2:
            raise NotReducibleError("the first batch has only one row")
        try:
            return [
                self._part(*bounds, ReplayRun(whole.run), 0.0)
                for bounds in ((0, rows // 2), (rows // 2, rows))
            ]
        except TfdistError:
            raise
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise NotReducibleError(f"it fails on a part of the batch ({lines[0]})") from error

    def _part(self, begin: int, end: int, run: RecordingRun, start: float) -> BatchPart:
        """Runs the step on some rows, with all metrics set to `start`."""
        values = self._values(start)
        rows = batches.take(self.batch, begin, end)
        scope, logs = try_step(self.model, self.step, rows, run, self.scalings, values)
        before = {id(v): array(value) for v, value in values}
        changes = {
            key: array(scope.state_mapping[key]) - before[key]
            for key in scope.assigned
            if key in before
        }
        gradients = [[None if g is None else array(g) for g in each] for each in run.consumed]
        indices = [
            {i: g.indices.numpy() for i, g in enumerate(each) if isinstance(g, tf.IndexedSlices)}
            for each in run.consumed
        ]
        return BatchPart(end - begin, run, gradients, indices, changes, flat_logs(logs), scope)

    def _values(self, start: float) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Returns values for a trial: close to those of the variables, but not zero.

        From a value of zero, no reduction can be inferred. BatchNorm's statistics are not changed.

        Args:
            start: The value of the metrics' variables.
        """
        model = self.model
        metrics = {id(v) for m in keras_model.metrics_of(model) for v in m.variables}
        layers = batch_norm.layers_of(model)
        statistics = {id(v) for layer in layers for v in layer.non_trainable_variables}
        weights = {id(v) for v in model.variables} - statistics
        fixed = {id(v) for v in self.known} - weights
        return [
            (v, tf.cast(tf.fill(value.shape, start), value.dtype) if id(v) in metrics else value)
            for v, value in perturbation.values(self.known, self.number, fixed)
        ]


def array(tensor: Any) -> np.ndarray:
    """Returns a tensor or `tf.IndexedSlices` as an array that can be subtracted."""
    tensor = tf.convert_to_tensor(tensor)
    if tensor.dtype.is_floating:
        tensor = tf.cast(tensor, tf.float64)
    elif tensor.dtype.is_bool or tensor.dtype.is_unsigned:
        tensor = tf.cast(tensor, tf.int64)
    return tensor.numpy()


class RecordingRun(LocalRun):
    """The run on all rows: records gradients and results of metrics."""

    def __init__(self) -> None:
        self.inner = False
        self.consumed: list[list] = []
        self.results: list[Any] = []

    def gradients(
        self, compute: Callable[[], list], inner: bool, targets: list[tf.Tensor] | None
    ) -> list:
        del targets
        self.inner |= inner
        self.consumed.append(compute())
        return self.consumed[-1]

    def result(
        self, scope: CustomStepScope, metric: keras.Metric, compute: Callable[[], Any]
    ) -> Any:
        self.results.append(compute())
        return self.results[-1]


class ReplayRun(RecordingRun):
    """The run on a part: continues with what was recorded for all rows."""

    def __init__(self, whole: RecordingRun) -> None:
        super().__init__()
        self._whole = whole

    def gradients(
        self, compute: Callable[[], list], inner: bool, targets: list[tf.Tensor] | None
    ) -> list:
        super().gradients(compute, inner, targets)
        return self._whole.consumed[len(self.consumed) - 1]

    def result(
        self, scope: CustomStepScope, metric: keras.Metric, compute: Callable[[], Any]
    ) -> Any:
        self.results.append(None)
        return self._whole.results[len(self.results) - 1]
