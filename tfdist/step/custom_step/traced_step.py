"""Static analysis of a custom step: reductions that hold for all weights and rows.

The step is traced on a batch with any number of rows, and never run. The gradients of a loss that
is a mean over rows are means, too, so it is the loss that is analyzed and not its gradients. From
there on, gradients are what all replicas have after the all-reduce: the same numbers. So are the
results of metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.precision import Scaling
from tfdist.step.custom_step.scope import CustomStepScope, LocalRun, patched_for_custom_step
from tfdist.step.custom_step.trial import StepFn, flat_logs
from tfdist.step.reductions import DECISIONS, Reduction, reduction_of, reduction_of_change
from tfdist.step.row_dependence import FREE, UNKNOWN, Dependence, Kind, worst
from tfdist.step.traced_forward import TracedForward, added_to
from tfdist.upstream import keras_model
from tfdist.upstream.keras_losses import losses_of_one_device


class NotReducibleError(Exception):
    """A value of the step is neither a mean nor a sum over rows; the message names it."""


class TracedStep:
    """The traced step, and the reductions that follow from it.

    Every method returns None where the analysis meets an operation that it does not know.

    Args:
        model: A built model.
        known: All variables that its step may change.
        step: Its `train_step` or `test_step`.
        scalings: The scaling of each optimizer that scales its loss, by id.
        batch: The first global batch.

    Raises:
        ValueError: The step cannot be traced, or the batch has other than dense tensors.
    """

    def __init__(
        self,
        model: keras.Model,
        known: Sequence[keras.Variable],
        step: StepFn,
        scalings: Mapping[int, Scaling],
        batch: Any,
    ) -> None:
        if getattr(model, "run_eagerly", False):
            raise ValueError("The model runs eagerly: its code may not be traceable.")
        metrics = [v for m in keras_model.metrics_of(model) for v in m.variables]
        run = _TracingRun({id(v) for v in metrics})

        def compute(rows: Any) -> None:
            values = [(v, tf.identity(tf.convert_to_tensor(v))) for v in known]
            run.starts = {id(v): value for v, value in values}
            scope = CustomStepScope(values, run, scalings, trial=True)
            with scope, patched_for_custom_step(model), losses_of_one_device():
                logs = flat_logs(step(rows))
                self._logs = {name: tf.convert_to_tensor(log) for name, log in logs.items()}
                for variable in metrics:
                    run.end_of_metric(scope, variable)
            self._scope, self._ends = scope, dict(scope.state_mapping)

        self._run = run
        # The graph lives as long as the traced forward pass.
        self._traced = TracedForward(model, batch, training=True, compute=compute, known=run.known)
        self._analysis = self._traced.analysis

    def gradient(self, number: int) -> Reduction | None:
        """Returns the reduction of the gradients that the step computes as the n-th ones.

        Raises:
            NotReducibleError: They are neither means nor sums.
        """
        if number >= len(self._run.targets) or (targets := self._run.targets[number]) is None:
            return None
        return _one(f"its gradient number {number}", [self._analysis.of(t) for t in targets])

    def log(self, name: str) -> Reduction | None:
        """Returns the reduction of a log.

        Raises:
            NotReducibleError: It is neither a mean nor a sum.
        """
        if name not in self._logs:
            return None
        value = self._analysis.of(self._logs[name])
        if value.kind is Kind.ROWS:
            return None
        return _decided(f"its log {name!r}", reduction_of(value))

    def state(self, variable: keras.Variable) -> Reduction | None:
        """Returns the reduction of the change of a variable.

        Raises:
            NotReducibleError: It is neither a mean nor a sum.
        """
        key = id(variable)
        what, is_float = f"the update of {variable.path!r}", variable.value.dtype.is_floating
        if key in self._run.changes:
            return self._metric(what, self._run.changes[key], is_float)
        if key not in self._scope.assigned or key not in self._run.starts:
            return None
        new = self._ends[key]
        if self._analysis.of(new).is_plain:
            # The update of an optimizer is the same on all replicas, as are integers.
            is_same = key in self._scope.by_optimizers or not is_float
            DECISIONS["analysis"] += 1
            return Reduction.SAME if is_same else Reduction.MEAN
        start = self._run.starts[key]
        return _decided(what, reduction_of_change(self._analysis, start, new))

    def _metric(self, what: str, pairs: list[tuple[Any, Any]], is_float: bool) -> Reduction | None:
        """Returns the reduction of what is added to a metric's variable, which starts at zero."""
        values: list[Dependence] = []
        for start, new in pairs:
            if (added := added_to(start, new)) is None:
                if worst([self._analysis.of(new)]) is UNKNOWN:
                    return None
                raise NotReducibleError(f"{what} is not a sum over rows")
            values += [self._analysis.of(each) for each in added]
        values = [value for value in values if not value.is_zero]
        if all(value.is_plain for value in values) and not is_float:
            return Reduction.SAME
        return _one(what, values) if values else Reduction.SUM


def _one(what: str, values: Sequence[Dependence]) -> Reduction | None:
    """Returns the one reduction of several values; None if it is not known or there are none."""
    kinds = {_decided(what, reduction_of(value)) for value in values}
    if None in kinds or not kinds:
        return None
    if len(kinds) > 1:
        raise NotReducibleError(f"{what} is partly a mean, partly a sum over rows")
    return kinds.pop()


def _decided(what: str, found: Reduction | Dependence) -> Reduction | None:
    """Returns a reduction that the analysis found; None if it found none.

    Raises:
        NotReducibleError: The value is neither a mean nor a sum over rows.
    """
    if found is UNKNOWN:
        return None
    DECISIONS["analysis"] += 1
    if not isinstance(found, Reduction):
        raise NotReducibleError(f"{what} is neither a mean nor a sum over rows")
    return found


class _TracingRun(LocalRun):
    """The run of a step that is traced: notes what the replicas of a real run would exchange.

    Args:
        metrics: Ids of the metrics' variables.

    Attributes:
        targets: What the step differentiates, for each gradient; None if that is not all.
        known: Tensors that are the same on all replicas after an exchange.
        starts: Values of variables at the beginning, and of metrics after their last result, by id.
        changes: Values of the metrics' variables before and after the step's updates, by id.
    """

    def __init__(self, metrics: Collection[int]) -> None:
        self._metrics = metrics
        self.targets: list[list[tf.Tensor] | None] = []
        self.known: list[tuple[tf.Tensor, Dependence]] = []
        self.starts: dict[int, tf.Tensor] = {}
        self.changes: dict[int, list[tuple[tf.Tensor, tf.Tensor]]] = {}

    def gradients(
        self, compute: Callable[[], list], inner: bool, targets: list[tf.Tensor] | None
    ) -> list:
        del inner
        self.targets.append(targets)
        return [None if g is None else self._exchanged(g) for g in compute()]

    def result(
        self, scope: CustomStepScope, metric: keras.Metric, compute: Callable[[], Any]
    ) -> Any:
        for variable in metric.variables:
            self.end_of_metric(scope, variable)
        return tf.nest.map_structure(self._exchanged, compute())

    def end_of_metric(self, scope: CustomStepScope, variable: keras.Variable) -> None:
        """Notes the change of a metric's variable, which begins at another value from here on."""
        key = id(variable)
        if key not in self._metrics or key not in scope.pending:
            return
        self.changes.setdefault(key, []).append((self.starts[key], scope.state_mapping[key]))
        scope.state_mapping[key] = self.starts[key] = self._exchanged(scope.state_mapping[key])
        scope.pending.discard(key)

    def _exchanged(self, value: Any) -> Any:
        """Returns a tensor as it is after an exchange: the same on all replicas."""
        if isinstance(value, tf.IndexedSlices):
            values, indices = self._exchanged(value.values), self._exchanged(value.indices)
            return tf.IndexedSlices(values, indices, value.dense_shape)
        value = tf.identity(value)
        self.known.append((value, FREE))
        return value
