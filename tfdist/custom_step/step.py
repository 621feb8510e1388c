"""The custom step: a `train_step` or `test_step` that a model's class overrides.

The user's method runs on every replica, in a scope that keeps assignments aside. Its tapes return
the gradients of the global batch, its optimizers change values that are the same on all replicas,
and its metrics see all rows. So whatever it does with them is what one device does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import keras
import tensorflow as tf

from tfdist.custom_step.reductions import ReductionPlan, infer_reductions
from tfdist.custom_step.replica_run import ReplicaRun
from tfdist.custom_step.scope import CustomStepScope, LocalRun, patched_for_custom_step
from tfdist.custom_step.trial import BuiltStep, flat_logs
from tfdist.errors import UnsupportedModelError
from tfdist.patches.keras_patches import keras_patched
from tfdist.patches.sizes_on_host import with_sizes_on_host
from tfdist.replica import replica as replicas
from tfdist.replica.options import StepOptions
from tfdist.replica.replica import Replica
from tfdist.step.forward_backward import all_reduce
from tfdist.step.loss_scaling import Scaling
from tfdist.step.metric_results import flat
from tfdist.step.state import zeros_beside
from tfdist.strategies.base import Strategy
from tfdist.strategies.batches import Share
from tfdist.upstream import keras_model, keras_optimizers
from tfdist.upstream.tensorflow_runtime import op_seeds_by


class CustomStep:
    """A custom step on a global batch; implements `strategies.inner_loop.Step`.

    Args:
        model: A compiled model.
        built: What `trial.build` found.
        strategy: Runs the replicas.
        training: Whether the step is `train_step` or `test_step`.
        first_batch: Returns the first global batch.
        options: The options of the step; there are no rounds of accumulation and no `remat`.
        cause: What makes the step custom, such as `"MyModel.train_step"`.

    Attributes:
        cause: As passed.
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
        self._places: dict[int, int] = {}
        self._variables: list[keras.Variable] = []
        names, dtype = self._plan.logs, keras.config.floatx()
        self._logs = {name: keras.Variable(0.0, dtype=dtype, name=name) for name in names}

    def __call__(self, total_rows: tf.Tensor, shares: Sequence[Share]) -> Any:
        strategy = self._strategy
        with ExitStack() as stack:
            stack.enter_context(keras_patched(self._model, self._options))
            stack.enter_context(patched_for_custom_step(self._model))
            stack.enter_context(op_seeds_by(_seed_on_replica))
            on_replica = with_sizes_on_host(self._on_replica)
            results = strategy.run(lambda i: on_replica(i, total_rows, shares[i]))
        return strategy.update(self._apply, results)

    def _on_replica(self, index: int, total_rows: tf.Tensor, share: Share) -> tuple[dict, dict]:
        """Returns new values of variables, by place, and logs: the same on all replicas."""
        if self.full_batch_reason:
            return self._of_full_batch(index, share)
        return self._on_rows(index, total_rows, share)

    def _of_full_batch(self, index: int, share: Share) -> tuple[dict, dict]:
        """Returns what the first replica computes from the full batch, on all replicas.

        The others do not call the step: what it does in Python happens once per process.
        """
        if index == 0:
            self._of_first = self._on_rows(index, share.num_rows, share)
        number = self._strategy.first_replica + index
        news, logs = self._of_first
        floats = {place: new for place, new in news.items() if new.dtype.is_floating}
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
            if isinstance(run, ReplicaRun):
                news, logs = run.finish(scope, old, logs)
            else:
                news = {key: scope.state_mapping[key] for key in scope.assigned}
        return {self._place(scope.assigned[key]): new for key, new in news.items()}, logs

    def _place(self, variable: keras.Variable) -> int:
        """Returns the number of a variable, the same on all replicas."""
        if id(variable) not in self._places:
            self._places[id(variable)] = len(self._variables)
            self._variables.append(variable)
        return self._places[id(variable)]

    def _apply(self, results: tuple[dict, dict]) -> tf.Tensor:
        """Updates one copy of the variables; returns a tensor that is ready once that is done."""
        news, logs = results
        written = [self._variables[place].assign(new) for place, new in news.items()]
        written += [self._logs[name].assign(value) for name, value in logs.items()]
        self._strategy.variables.after_update(self._variables)
        with tf.control_dependencies(written):
            return tf.constant(0)

    def logs(self) -> dict[str, tf.Tensor]:
        """Returns the metrics if that is what the step returns, else its last results."""
        metrics = flat(self._model.get_metrics_result())
        if metrics.keys() == self._logs.keys():
            return metrics
        return {name: tf.convert_to_tensor(v) for name, v in self._logs.items()}


def _seed_on_replica(seed: int) -> int:
    """Returns another seed of `tf.random` on each replica: all draw from the model's one seed."""
    replica = replicas.current()
    return seed if replica is None else seed + replica.index
