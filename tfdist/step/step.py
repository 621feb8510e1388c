"""The steps on a global batch: training, evaluation, and outputs with random numbers.

A training step is one optimizer update. In order:
split -> forward -> loss -> backward -> all-reduce -> unscale -> clip -> apply -> metrics.
The inner loop splits the batch, `forward_backward` computes every replica's part of the gradients,
and the Keras optimizer clips and applies their sum, as it does on one device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.patches.keras_patches import keras_patched
from tfdist.replica.replica import Replica, StepOptions
from tfdist.replica.scope import Scope
from tfdist.step.accumulation import GradientAccumulation
from tfdist.step.forward_backward import ReplicaOutputs, forward, forward_backward
from tfdist.step.loss_scaling import Scaling
from tfdist.step.replica_runner import ReplicaRunner
from tfdist.step.state import ForwardState, offset
from tfdist.strategies.base import Strategy
from tfdist.strategies.batches import Batch, Element, Share, drop_padding
from tfdist.strategies.mirrored_variables import has_copies
from tfdist.upstream.keras_model import global_generator, seeds_of
from tfdist.upstream.keras_optimizers import (
    global_norm,
    is_of_keras,
    learning_rate_evaluated,
    optimizers_of_one_device,
)
from tfdist.upstream.tensorflow_runtime import assignments_checked_by


class TrainStep:
    """One optimizer step on a global batch; implements `strategies.inner_loop.Step`.

    Args:
        model: A built and compiled model.
        strategy: Runs the replicas and sums their gradients.
        state: The variables of the model that a forward pass may change.
        scaling: The scaling of the model's loss.
        options: The options of the step.
        full_batch_reason: Why every replica computes the full batch; None if each computes its
            own part of it.
        results: Returns the logs; None: those of the model's metrics.

    Attributes:
        scaling: As passed.
        refused_by_xla: As in `ReplicaRunner`.
        accumulation: Gradients that wait for later batches, for an optimizer with
            `gradient_accumulation_steps`; None for any other optimizer.
    """

    training = True

    def __init__(
        self,
        model: keras.Model,
        strategy: Strategy,
        state: ForwardState,
        scaling: Scaling,
        options: StepOptions,
        full_batch_reason: str | None = None,
        results: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self._model, self._strategy, self._state, self.scaling = model, strategy, state, scaling
        self._trainable = model.trainable_variables
        self._patches = functools.partial(keras_patched, model, options)
        compute = functools.partial(
            forward_backward, strategy, model, self._trainable, state, scaling,
            offload=options.offload_activations,
        )  # fmt: skip
        self._replicas = ReplicaRunner(
            strategy, model, compute, options.accumulate, full_batch_reason, self._trainable
        )
        self._update = self._replicas.update_function(self._apply, share_trace=True)
        self._step = self._replicas.in_one_program(self._make)
        self.refused_by_xla = self._replicas.refused_by_xla
        self._results = results or model.get_metrics_result
        self.accumulation: GradientAccumulation | None = None
        if scaling.optimizer.gradient_accumulation_steps:
            self.accumulation = GradientAccumulation(strategy, scaling, self._trainable)
        self._norm: keras.Variable | None = None
        if options.gradient_norm:
            self._norm = keras.Variable(0.0, trainable=False, name="gradient_norm")

    def __call__(self, total_rows: tf.Tensor, shares: Sequence[Share]) -> Any:
        return self._step(total_rows, shares)

    def _make(self, total_rows: tf.Tensor, shares: Sequence[Share]) -> Any:
        # ---- on every replica: forward, loss, backward, and the all-reduce ----
        with self._patches():
            if self.accumulation is None:
                sums = self._replicas.all_reduced(total_rows, shares)
            else:
                sums = self.accumulation.all_reduced(self._replicas.local(total_rows, shares))
        # ---- for every copy of the variables: unscale, clip, apply, and the metrics ----
        return self._strategy.update(self._update, sums)

    def _apply(self, sums: ReplicaOutputs) -> tf.Tensor:
        """Updates one copy of the variables; returns a tensor that is ready once that is done."""
        optimizer = self.scaling.optimizer
        # A weight that is written while the backward pass still reads it is copied first. One
        # group needs an edge per gradient and per write instead of one for each pair of them.
        # With a loss scale, the check for overflow waits for all gradients anyway, and an edge out
        # of a gradient of BatchNorm would keep Grappler from fusing it with that of a ReLU.
        waited = [] if self.scaling.active else tf.nest.flatten(sums.gradients, True)
        with learning_rate_evaluated(optimizer), tf.control_dependencies([tf.group(*waited)]):
            by_index = self._state.rows.lookups.of_batch(sums.gradients_of(self._trainable))
            maxima = sums.maxima()
            gradients = [by_index.get(i) for i in range(len(self._trainable))]

            has_copies = self._strategy.num_replicas > 1

            def clip_and_apply(in_order: list) -> None:
                if self._trainable:
                    with (
                        optimizers_of_one_device(has_copies),
                        _known_assignments(optimizer, self._strategy),
                    ):
                        self.scaling.apply_gradients(in_order, self._trainable)
                        if self._norm is not None:  # of the gradients before they are clipped
                            gradients = [g for i, g in enumerate(in_order) if i not in maxima]
                            norm = tf.cast(global_norm(optimizer, gradients), self._norm.dtype)
                            if every := optimizer.gradient_accumulation_steps:
                                # Between two updates, the gradients are zeros.
                                norm = tf.where(norm > 0, norm / every, self._norm)
                            self._norm.assign(norm)

            # The state first: a layer may have assigned to a weight in its forward pass
            # (SpectralNormalization), and the gradients are those of the new value. As in Keras,
            # a step that is skipped because gradients overflow still changes the state.
            self._state.commit(sums.state, only_finite=self.scaling.active)
            any_overflow = self._strategy.variables.any_of_parts
            self.scaling.apply(gradients, maxima, clip_and_apply, any_overflow)
            self._strategy.variables.after_update(self._model.variables)
        with tf.control_dependencies([self._state.commit_metrics(sums.metrics)]):
            return tf.identity(optimizer.iterations)

    def logs(self) -> dict[str, tf.Tensor]:
        """Returns the metrics over all steps since their last reset, and those of the last step."""
        norm = {} if self._norm is None else {"gradient_norm": tf.convert_to_tensor(self._norm)}
        return self._results() | self.scaling.logs() | norm


@contextmanager
def _known_assignments(optimizer: keras.optimizers.Optimizer, strategy: Strategy) -> Iterator[None]:
    """A context that refuses an optimizer that assigns to variables of which replicas have one."""
    has_copies_of_all = strategy.variables.are_local and strategy.num_local_replicas > 1
    if is_of_keras(optimizer) or not has_copies_of_all:
        yield
        return

    def check(variable: tf.Variable) -> None:
        if not has_copies(variable):
            raise UnsupportedModelError(
                f"{type(optimizer).__name__} assigns to the variable {variable.name!r}, which "
                "each replica would change again. Create it with self.add_variable in build."
            )

    with assignments_checked_by(check):
        yield


class EvaluateStep:
    """Loss and metrics of a global batch, without training. Arguments are as of `TrainStep`."""

    training = False

    def __init__(
        self,
        model: keras.Model,
        strategy: Strategy,
        state: ForwardState,
        options: StepOptions,
        full_batch_reason: str | None = None,
        results: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self._model, self._strategy, self._state = model, strategy, state
        self._results = results or model.get_metrics_result
        self._options = dataclasses.replace(options, sync_batch_norm=False, remat="none")
        compute = functools.partial(forward, model, state)
        self._replicas = ReplicaRunner(strategy, model, compute, 1, full_batch_reason)
        self._update = self._replicas.update_function(self._apply)
        self._step = self._replicas.in_one_program(self._make)

    def __call__(self, total_rows: tf.Tensor, shares: Sequence[Share]) -> Any:
        return self._step(total_rows, shares)

    def _make(self, total_rows: tf.Tensor, shares: Sequence[Share]) -> Any:
        with keras_patched(self._model, self._options):
            sums = self._replicas.all_reduced(total_rows, shares)
        return self._strategy.update(self._update, sums)

    def _apply(self, sums: ReplicaOutputs) -> tf.Tensor:
        """Updates one copy of the variables; returns a tensor that is ready once that is done."""
        self._state.commit(sums.state)
        return self._state.commit_metrics(sums.metrics)

    def logs(self) -> dict[str, tf.Tensor]:
        """Returns the metrics over all steps since their last reset."""
        return self._results()


def seeds_in_predictions(model: keras.Model) -> list[keras.Variable]:
    """Returns the seeds that a prediction may change."""
    generator = global_generator()
    return seeds_of(model) + ([] if generator is None else [generator.state])


def drawn_outputs(
    model: keras.Model,
    strategy: Strategy,
    options: StepOptions,
    fn: Callable[[Batch], Any],
    element: Element,
) -> list[Any]:
    """Does what `Strategy.outputs` does, with the random numbers of one device.

    The seeds advance once per batch, alike on every replica.
    """
    seeds, bucket_bytes = seeds_in_predictions(model), strategy.exchange.bucket_bytes

    def on_replica(index: int) -> tuple[Any, dict[int, tf.Tensor]]:
        share = element.shares[index]
        replica = Replica(
            strategy.first_replica + index, strategy.num_replicas, 1, 0, share.num_rows,
            element.num_rows, strategy.all_reduce, first_row=share.first_row,
        )  # fmt: skip
        is_own = options.replica_random
        shifted = [(v, v + offset(v, replica.index)) for v in seeds] if is_own else []
        with Scope(shifted, bucket_bytes=bucket_bytes, collect_losses=True) as scope, replica:
            outputs = drop_padding(fn(share.rows), share.num_rows)
            assigned = [scope.assigned(seed) for seed in seeds]
        news = {i: new for i, new in enumerate(assigned) if new is not None}
        if is_own:
            news = {i: new - offset(seeds[i], replica.index) for i, new in news.items()}
        return outputs, news

    def write(result: tuple[Any, dict[int, tf.Tensor]]) -> tf.Tensor:
        written = [seeds[i].assign(new) for i, new in result[1].items()]
        with tf.control_dependencies(written):
            return tf.constant(0)

    options = dataclasses.replace(options, sync_batch_norm=False, remat="none")
    with keras_patched(model, options):
        results = strategy.run(on_replica)
    strategy.update(write, results)
    return [outputs for outputs, _ in strategy.local_results(results)]
