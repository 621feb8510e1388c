"""The custom step: a `train_step` or `test_step` that a model's class overrides.

The user's method runs on every replica, in a scope that keeps assignments aside. Its tapes return
the gradients of the global batch, its optimizers change values that are the same on all replicas,
and its metrics see all rows. So whatever it does with them is what one device does.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.custom_step.scope import CustomStepScope, LocalRun, Values, patched_for_custom_step
from tfdist.custom_step.trial import BuiltStep, ReductionPlan, flat_logs, infer_reductions
from tfdist.errors import UnsupportedModelError
from tfdist.patches.keras_patches import keras_patched
from tfdist.patches.sizes_on_host import with_sizes_on_host
from tfdist.replica import replica as replicas
from tfdist.replica.program_state import python_state_kept
from tfdist.replica.replica import Replica, StepOptions
from tfdist.rows import Reduction
from tfdist.step.forward_backward import all_reduce, all_reduce_gradients
from tfdist.step.loss_scaling import Scaling
from tfdist.step.state import offset, zeros_beside
from tfdist.strategies.base import Strategy
from tfdist.strategies.batches import Share, split
from tfdist.upstream import keras_model, keras_optimizers
from tfdist.upstream.tensorflow_graphs import is_from_half
from tfdist.upstream.tensorflow_runtime import op_seeds_by


class ReplicaRun(LocalRun):
    """A `LocalRun` that combines gradients, metrics, and logs of all replicas.

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
        self, compute: Callable[..., list], inner: bool, targets: list[tf.Tensor] | None
    ) -> list:
        del targets
        reductions, number = self._plan.gradients, self._num_taken
        self._num_taken += 1
        if inner or number >= len(reductions):
            raise UnsupportedModelError(
                "The step computes other gradients than on the first batch. What it does must not "
                "depend on Python state."
            )
        alike = self._plan.alike[number]
        # Weighted before the backward pass: float16 then overflows where it does on one device.
        is_mean = reductions[number] is Reduction.MEAN
        local = compute(self._replica.fraction if is_mean else None)
        parts = {i: self._part(g, Reduction.SUM) for i, g in enumerate(local) if g is not None}
        sent = {i: g.values if i in alike else g for i, g in parts.items()}
        sums, _ = all_reduce_gradients(self._strategy, sent, ())
        for i in sums:
            if is_from_half(local[i]):  # as on one device, where the sum may overflow
                sums[i] = tf.cast(tf.cast(sums[i], tf.float16), sums[i].dtype)
        for i in alike:
            sums[i] = tf.IndexedSlices(sums[i], local[i].indices, local[i].dense_shape)
        return [sums.get(i) for i in range(len(local))]

    def result(
        self, scope: CustomStepScope, metric: keras.Metric, compute: Callable[[], Any]
    ) -> Any:
        self.exchange_metrics(scope, metric.variables)
        exchanged = [v for v in metric.variables if id(v) in self._metrics]
        for variable in exchanged:
            scope.state_mapping[id(variable)] = self._metrics[id(variable)]
        result = compute()
        for variable in exchanged:
            scope.state_mapping[id(variable)] = tf.zeros(variable.shape, variable.dtype)
        return result

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
        self.exchange_metrics(scope, list(scope.updated.values()))
        news, sent = {}, {}
        for key, variable in scope.updated.items():
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
        summed = [name for name in logs if kinds[name] is not Reduction.SAME]
        sent_logs = {name: self._part(logs[name], kinds[name]) for name in summed}
        sums, summed_logs = all_reduce(self._strategy, (list(sent.values()), sent_logs))
        for key, total in zip(sent, sums, strict=True):
            is_sum = self._state_reduction(scope.updated[key]) is Reduction.SUM
            news[key] = before[key] + total if is_sum else total
        return news, logs | summed_logs

    def _state_reduction(self, variable: keras.Variable) -> Reduction:
        if (how := self._plan.states.get(id(variable))) is not None:
            return how
        raise UnsupportedModelError(
            f"The step changes {variable.path!r}, which it did not change on the first batch. What "
            "it does must not depend on Python state."
        )

    def _part(self, value: Any, how: Reduction) -> Any:
        """Returns what this replica's value adds to that of the batch."""
        if isinstance(value, tf.IndexedSlices):
            part = self._part(value.values, how)
            return tf.IndexedSlices(part, value.indices, value.dense_shape)
        value = tf.convert_to_tensor(value)
        replica = self._replica
        return replica.if_counted(replica.by_rows(value) if how is Reduction.MEAN else value)


class CustomStep:
    """A custom step on a global batch; implements `strategies.inner_loop.Step`.

    Attributes:
        cause: As passed.
        in_xla: Whether XLA compiles the step; until it is traced, whether it is asked to.
        variables: The variables that the step may change, and those that count skipped steps.
        full_batch_reason: Why every replica computes the full batch, of which only the first
            replica's results count; None if each computes its own part of it.

    Raises:
        UnsupportedModelError: The step cannot be computed over replicas.
    """

    def __init__(
        self,
        model: keras.Model,
        built: BuiltStep,
        strategy: Strategy,
        training: bool,
        first_batch: Callable[[], Any],
        options: StepOptions,
        cause: str,
    ) -> None:
        self.training, self._model, self._strategy = training, model, strategy
        self.cause = cause
        self._name = "train_step" if training else "test_step"
        self._options = dataclasses.replace(options, remat="none")
        if training and not strategy.variables.writes_alone:
            raise UnsupportedModelError(
                f"{cause} makes a custom step, which assigns new weights, with which asynchronous "
                "workers would overwrite each other's. Use one worker, or another strategy."
            )
        self._scalings = {
            id(optimizer): Scaling(optimizer, options.loss_scale)
            for optimizer in keras_optimizers.optimizers_of(model)
            if isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        }
        self.variables = [
            *built.variables,
            *(scaling.skipped for scaling in self._scalings.values()),
        ]
        self._plan = ReductionPlan.of_full_batch(built.logs, None)
        if strategy.num_replicas > 1:
            built = BuiltStep(self.variables, built.logs)
            step = getattr(model, self._name)
            self._plan = infer_reductions(model, built, step, self._scalings, first_batch())
        digests = strategy.group.gather([self._plan.digest()])
        reason = self._plan.full_batch_reason
        if reason is None and (digests != digests[0]).any():
            reason = "another worker infers other reductions"
        self.full_batch_reason = reason
        self._generator = keras_model.global_generator()
        self._of_first: tuple[dict, dict] = {}, {}
        can_read = strategy.variables.are_local and strategy.num_replicas == 1
        self.in_xla, self._first_batch = bool(model.jit_compile and can_read), first_batch
        self._places: dict[int, int] = {}
        self._variables: list[keras.Variable] = []
        self._logs = {
            name: keras.Variable(np.zeros(shape), dtype=keras.config.floatx(), name=name)
            for name, shape in built.logs.items()
        }

    def __call__(self, total_rows: tf.Tensor, shares: Sequence[Share]) -> Any:
        if not self.in_xla or tf.executing_eagerly():
            return self._make(total_rows, shares)
        whole = tf.function(lambda *share: self._make(share[0], [Share(*share)]), autograph=False)
        traced: list[Any] = []

        def step(*share: Any) -> Any:  # traced once, because it may count in Python
            traced.append(whole.get_concrete_function(*share))
            return traced[0](*share)

        share = shares[0][:2]
        program = tf.function(step, jit_compile=True, autograph=False).get_concrete_function(*share)
        try:
            with tf.init_scope(), python_state_kept():
                (first,) = split(self._first_batch(), 1, [0])
                on_first = tf.function(lambda: traced[0](*first[:2]), jit_compile=True)
                on_first.experimental_get_compiler_ir()(stage="hlo_serialized")
        except (tf.errors.OpError, ValueError, TypeError) as error:
            warnings.warn(
                f"jit_compile is ignored in the custom step that {self.cause} makes, because XLA "
                f"cannot compile it: {error}",
                stacklevel=2,
            )
            self.in_xla = False
            return traced[0](*share)
        return program(*share)

    def _make(self, total_rows: tf.Tensor, shares: Sequence[Share]) -> Any:
        strategy = self._strategy
        with ExitStack() as stack:
            stack.enter_context(keras_patched(self._model, self._options))
            stack.enter_context(patched_for_custom_step(self._model))
            stack.enter_context(op_seeds_by(_seed_on_replica))
            on_replica = self._on_replica if self.in_xla else with_sizes_on_host(self._on_replica)
            results = strategy.run(lambda i: on_replica(i, total_rows, shares[i]))
        return strategy.update(self._apply, results)

    def _on_replica(self, index: int, total_rows: tf.Tensor, share: Share) -> tuple[dict, dict]:
        """Returns new values of variables, by place, and logs: the same on all replicas."""
        if not self.full_batch_reason:
            return self._on_rows(index, total_rows, share)
        # The first replica computes the full batch. The others do not call the step: what it does
        # in Python happens once per process.
        if index == 0:
            self._of_first = self._on_rows(index, share.num_rows, share)
        number = self._strategy.first_replica + index
        news, logs = self._of_first
        floats = {i: new for i, new in news.items() if new.dtype.is_floating}
        if number:
            # The zeros must not be constants: TensorFlow would move their all-reduce out of the
            # loop over the steps, and the other replicas would time out waiting for it.
            zeros = functools.partial(
                zeros_beside, zero=tf.minimum(share.num_rows, 0), here=index > 0
            )
            sent = tf.nest.map_structure(zeros, (floats, logs))
        else:
            sent = floats, logs
        floats, logs = all_reduce(self._strategy, sent)
        return news | floats, logs

    def _on_rows(self, index: int, total_rows: tf.Tensor, share: Share) -> tuple[dict, dict]:
        """Runs the step on rows; returns new values of variables, by place, and logs."""
        if self._generator is not None:
            keras_model.use_global_generator(self._generator)
        strategy, is_alone = self._strategy, self._strategy.num_replicas == 1
        number = strategy.first_replica + index
        variables = {id(v): v for v in self.variables}
        old = {key: tf.convert_to_tensor(v) for key, v in variables.items()}
        before = dict(old)
        if is_alone or self.full_batch_reason:
            replica = Replica(0, 1, 1, 0, share.num_rows, share.num_rows, lambda tensors: tensors)
            run = LocalRun()
        else:
            replica = Replica(
                number, strategy.num_replicas, 1, 0, share.num_rows, total_rows,
                strategy.all_reduce, first_row=share.first_row,
            )  # fmt: skip
            keys = [id(v) for m in keras_model.metrics_of(self._model) for v in m.variables]
            metrics = {k: old[k] for k in keys}
            is_random = self._options.replica_random
            run = ReplicaRun(strategy, replica, self._plan, metrics, is_random)
            before |= {key: tf.zeros_like(old[key]) for key in keys}
        scope = CustomStepScope([(v, before[k]) for k, v in variables.items()], run, self._scalings)
        with scope, replica:
            logs = flat_logs(getattr(self._model, self._name)(share.rows))
            logs = {name: tf.cast(logs[name], v.dtype) for name, v in self._logs.items()}
            for key, log in logs.items():
                if log.shape != self._logs[key].shape:
                    raise UnsupportedModelError(
                        f"{self.cause} returns {key!r} with a value for each row. Return a number, "
                        "or the result of a metric."
                    )
            if isinstance(run, ReplicaRun):
                news, logs = run.finish(scope, old, logs)
            else:
                news = {key: scope.state_mapping[key] for key in scope.updated}
        return {self._place(scope.updated[key]): new for key, new in news.items()}, logs

    def _place(self, variable: keras.Variable) -> int:
        """Returns the number of a variable, the same on all replicas."""
        if id(variable) not in self._places:
            self._places[id(variable)] = len(self._variables)
            self._variables.append(variable)
        return self._places[id(variable)]

    def _apply(self, results: tuple[dict, dict]) -> tf.Tensor:
        """Updates one copy of the variables; returns a tensor that is ready once that is done."""
        news, logs = results
        written = [self._variables[index].assign(new) for index, new in news.items()]
        written += [self._logs[name].assign(value) for name, value in logs.items()]
        self._strategy.variables.after_update(self._variables)
        with tf.control_dependencies(written):
            return tf.constant(0)

    def logs(self) -> dict[str, tf.Tensor]:
        """Returns the results of the last step."""
        return {name: tf.convert_to_tensor(v) for name, v in self._logs.items()}


def _seed_on_replica(seed: int) -> int:
    """Returns another seed of `tf.random` on each replica: all draw from the model's one seed."""
    replica = replicas.current()
    return seed if replica is None else seed + replica.index
