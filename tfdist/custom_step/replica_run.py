"""A custom step on one replica's rows of the global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.custom_step.reductions import ReductionPlan
from tfdist.custom_step.scope import CustomStepScope, LocalRun, Values
from tfdist.errors import UnsupportedModelError
from tfdist.replica.replica import Replica
from tfdist.rows.reductions import Reduction
from tfdist.step.forward_backward import all_reduce, all_reduce_gradients
from tfdist.step.state import offset
from tfdist.strategies.base import Strategy


class ReplicaRun(LocalRun):
    """A `StepRun` that combines gradients, metrics, and logs of all replicas.

    Args:
        strategy: Sums over the replicas.
        replica: This replica.
        plan: The reductions of everything that the step computes.
        metrics: States of the model's metrics before the step; in the scope they start at zero.
        replica_random: Whether the replica draws its own random numbers.
    """

    def __init__(
        self,
        strategy: Strategy,
        replica: Replica,
        plan: ReductionPlan,
        metrics: Values,
        replica_random: bool = False,
    ) -> None:
        self._strategy, self._replica, self._plan = strategy, replica, plan
        self._metrics, self._num_taken = dict(metrics), 0
        self._replica_random = replica_random

    def seed(self, drawn: tf.Tensor) -> tf.Tensor:
        return drawn + offset(drawn, self._replica.index) if self._replica_random else drawn

    def gradients(
        self, compute: Callable[[], list], inner: bool, targets: list[tf.Tensor] | None
    ) -> list:
        del targets
        known, number = self._plan.gradients, self._num_taken
        self._num_taken += 1
        if inner or number >= len(known):
            raise UnsupportedModelError(
                "The step computes other gradients than on the first batch. What it does must not "
                "depend on Python state."
            )
        self._replica.weight = self._weight(known[number])
        own = compute()
        self._replica.weight = None
        parts = {i: self._part(g, known[number]) for i, g in enumerate(own) if g is not None}
        alike = self._plan.alike[number]
        sums = self._summed({i: g.values if i in alike else g for i, g in parts.items()})
        for i in alike:
            sums[i] = tf.IndexedSlices(sums[i], own[i].indices, own[i].dense_shape)
        return [sums.get(i) for i in range(len(own))]

    def _summed(self, gradients: dict[int, Any]) -> dict[int, Any]:
        """All-reduces gradients."""
        return all_reduce_gradients(self._strategy, gradients, ())[0]

    def result(
        self, scope: CustomStepScope, metric: keras.Metric, compute: Callable[[], Any]
    ) -> Any:
        self.exchange_metrics(scope, metric.variables)
        own = [v for v in metric.variables if id(v) in self._metrics]
        for variable in own:
            scope.state_mapping[id(variable)] = self._metrics[id(variable)]
        found = compute()
        for variable in own:
            scope.state_mapping[id(variable)] = tf.zeros(variable.shape, variable.dtype)
        return found

    def exchange_metrics(self, scope: CustomStepScope, variables: list[keras.Variable]) -> None:
        """Sums over the replicas what was added to metrics since the last call."""
        pending = [v for v in variables if id(v) in self._metrics and id(v) in scope.pending]
        kinds = {id(v): self._state_reduction(v) for v in pending}
        sent = {
            key: self._part(scope.state_mapping[key], how)
            for key, how in kinds.items()
            if how is not Reduction.SAME
        }
        sums = all_reduce(self._strategy, list(sent.values()))
        totals = dict(zip(sent, sums, strict=True))
        for key in kinds:
            self._metrics[key] += totals.get(key, scope.state_mapping[key])
            scope.pending.discard(key)

    def finish(
        self, scope: CustomStepScope, before: Values, logs: dict[str, Any]
    ) -> tuple[Values, dict[str, Any]]:
        """Returns new values of variables, by id, and logs: the same on all replicas."""
        self.exchange_metrics(scope, list(scope.assigned.values()))
        news, sent = {}, {}
        for key, variable in scope.assigned.items():
            new, how = scope.state_mapping[key], self._state_reduction(variable)
            if key in self._metrics:
                news[key] = self._metrics[key]
            elif how is Reduction.SAME:
                news[key] = new
            elif how is Reduction.MEAN:
                sent[key] = self._part(new, how)
            else:
                sent[key] = self._part(new - before[key], how)
        kinds = self._plan.logs
        own = [name for name in logs if kinds[name] is not Reduction.SAME]
        sent_logs = {name: self._part(logs[name], kinds[name]) for name in own}
        sums, summed_logs = all_reduce(self._strategy, (list(sent.values()), sent_logs))
        for key, total in zip(sent, sums, strict=True):
            is_sum = self._state_reduction(scope.assigned[key]) is Reduction.SUM
            news[key] = before[key] + total if is_sum else total
        return news, logs | summed_logs

    def _state_reduction(self, variable: keras.Variable) -> Reduction:
        if (how := self._plan.states.get(id(variable))) is not None:
            return how
        raise UnsupportedModelError(
            f"The step changes {variable.path!r}, which it did not change on the first batch. What "
            "it does must not depend on Python state."
        )

    def _weight(self, how: Reduction) -> tf.Tensor:
        """Returns the weight of this replica's value in that of the batch, float64."""
        replica = self._replica
        if how is not Reduction.MEAN:
            return tf.constant(1.0, tf.float64)
        return tf.cast(replica.num_rows, tf.float64) / tf.cast(replica.total_rows, tf.float64)

    def _part(self, value: Any, how: Reduction) -> Any:
        """Returns what this replica's value adds to that of the batch."""
        if isinstance(value, tf.IndexedSlices):
            part = self._part(value.values, how)
            return tf.IndexedSlices(part, value.indices, value.dense_shape)
        value = tf.convert_to_tensor(value)
        if how is Reduction.MEAN:
            value = value * tf.cast(self._weight(how), value.dtype)
        return self._replica.if_counted(value)
