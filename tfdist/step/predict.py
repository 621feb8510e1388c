"""Outputs of a model that draws random numbers: each replica draws those of its rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.patches.keras_patches import keras_patched
from tfdist.replica.options import StepOptions
from tfdist.replica.replica import Replica
from tfdist.replica.scope import Scope
from tfdist.step.state import offset
from tfdist.strategies.base import Strategy
from tfdist.strategies.batches import Batch, Element, drop_padding
from tfdist.upstream.keras_model import global_generator, seeds_of


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

    Args:
        model: The model.
        strategy: Runs the replicas.
        options: The options of the trainer's steps.
        fn: Computes the outputs of rows.
        element: An element of a distributed data set.
    """
    seeds = seeds_in_predictions(model)

    def on_replica(index: int) -> tuple[Any, dict[int, tf.Tensor]]:
        share = element.shares[index]
        replica = Replica(
            strategy.first_replica + index, strategy.num_replicas, 1, 0, share.num_rows,
            element.num_rows, strategy.all_reduce, first_row=share.first_row,
        )  # fmt: skip
        is_own = options.replica_random
        own = [(v, v + offset(v, replica.index)) for v in seeds] if is_own else []
        with (
            Scope(own, bucket_bytes=strategy.exchange.bucket_bytes, collect_losses=True) as scope,
            replica,
        ):
            outputs = drop_padding(fn(share.rows), share.num_rows)
            assigned = {place: scope.assigned(seed) for place, seed in enumerate(seeds)}
        news = {place: new for place, new in assigned.items() if new is not None}
        if is_own:
            news = {i: new - offset(seeds[i], replica.index) for i, new in news.items()}
        return outputs, news

    def write(result: tuple[Any, dict[int, tf.Tensor]]) -> tf.Tensor:
        written = [seeds[place].assign(new) for place, new in result[1].items()]
        with tf.control_dependencies(written):
            return tf.constant(0)

    options = dataclasses.replace(options, sync_batch_norm=False, remat="none")
    with keras_patched(model, options):
        results = strategy.run(on_replica)
    strategy.update(write, results)
    return [outputs for outputs, _ in strategy.local_results(results)]
