"""Runs forward and backward pass on the replicas of this process, in one round or in several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.patches.sizes_on_host import with_sizes_on_host
from tfdist.replica.replica import Replica, Totals
from tfdist.step.accumulation import over_rounds
from tfdist.step.forward_backward import ReplicaOutputs, all_reduce_outputs
from tfdist.step.shared_trace import (
    NotShareableError,
    PackedOutputs,
    SharedReplicaTrace,
    SharedTrace,
)
from tfdist.step.state import Changes
from tfdist.strategies.base import Strategy
from tfdist.strategies.batches import Share, drop_padding

#: The sums on one replica: packed where all replicas share one trace.
Sums = ReplicaOutputs | PackedOutputs


class ReplicaRunner:
    """Computes the outputs of all replicas for a step, and sums them.

    Args:
        strategy: Runs the replicas.
        compute: Returns the outputs of a replica for its rows.
        num_rounds: Number of rounds in which each replica computes its batch.
        in_xla: Whether XLA compiles `compute`, if the replica has variables of its own.
        full_batch_reason: Why every replica computes the full batch, of which only the first
            replica's results count; None if each computes its own part of it.
        variables: The variables that `ReplicaOutputs.gradients` numbers by place.

    Raises:
        UnsupportedModelError: Full-batch mode with several rounds.
    """

    def __init__(
        self,
        strategy: Strategy,
        compute: Callable[[Replica, Share], ReplicaOutputs],
        num_rounds: int,
        in_xla: bool,
        full_batch_reason: str | None,
        variables: Sequence[keras.Variable] = (),
    ) -> None:
        if full_batch_reason and num_rounds > 1:
            raise UnsupportedModelError(
                f"accumulate={num_rounds} splits a batch into rounds, but this model needs the "
                f"full batch: {full_batch_reason}. Use accumulate=1."
            )
        self._strategy, self._num_rounds = strategy, num_rounds
        self._variables = variables
        self._in_xla = in_xla and strategy.variables.are_local
        self._compute = compute if self._in_xla else with_sizes_on_host(compute)
        self._has_full_batches = full_batch_reason is not None
        self._of_first = ReplicaOutputs({}, Changes({}, {}, {}), Changes({}, {}, {}))
        self._compiled: dict[int, Callable[..., ReplicaOutputs]] = {}
        self._shared: SharedReplicaTrace | None = None
        self._min_operations = None if strategy.num_local_replicas == 1 else strategy.one_trace_from
        if self._min_operations is not None and not (self._in_xla or full_batch_reason):
            self._shared = SharedReplicaTrace(
                self._independent_outputs, variables, self._min_operations
            )

    def all_reduced(self, total_rows: tf.Tensor, shares: Sequence[Share]) -> Any:
        """Returns the sums over all replicas, on each of them, in the form of `Strategy.run`.

        Args:
            total_rows: Rows of the global batch, int32 scalar.
            shares: The per-replica batch of each replica of this process.
        """
        run = self._strategy.run
        if self._num_rounds > 1:
            local = self.local(total_rows, shares)
            return run(lambda i: self._all_reduce(local[i]))
        compute = self._on_rows(total_rows)

        def on_replica(i: int) -> Sums:
            if (packed := self._packed(i, total_rows, 0, shares[i])) is None:
                return self._all_reduce(compute(i, 0, shares[i], Totals()))
            return packed._replace(tensors=self._strategy.all_reduce(packed.tensors))

        return run(on_replica)

    def local(self, total_rows: tf.Tensor, shares: Sequence[Share]) -> list[ReplicaOutputs]:
        """Returns the outputs of each replica of this process, before any all-reduce."""
        compute = self._on_rows(total_rows)
        if self._num_rounds > 1:
            return over_rounds(self._strategy, compute, shares, self._num_rounds)
        results = self._strategy.run(lambda i: compute(i, 0, shares[i], Totals()))
        return self._strategy.local_results(results)

    def update_function(
        self, apply: Callable[[ReplicaOutputs], tf.Tensor], share_trace: bool = False
    ) -> Callable[[Sums], tf.Tensor]:
        """Returns a function for `Strategy.update` that applies the sums of `all_reduced`.

        Args:
            apply: Updates one copy of the variables from the sums.
            share_trace: Whether to trace it once for all replicas where that is possible.
        """

        def update(sums: Sums) -> tf.Tensor:
            return apply(self._unpacked(sums))

        if not share_trace or self._min_operations is None:
            return update
        shared = SharedTrace(update, self._min_operations, writes=True)

        def update_by_shared_trace(sums: Sums) -> tf.Tensor:
            done = None if tf.executing_eagerly() else shared(sums)
            return update(sums) if done is None else done

        return update_by_shared_trace

    def _unpacked(self, sums: Sums) -> ReplicaOutputs:
        if isinstance(sums, ReplicaOutputs):
            return sums
        if self._shared is None:
            raise TypeError("Packed sums without a shared trace.")
        return self._shared.unpacked(sums)

    def _packed(
        self, index: int, total_rows: tf.Tensor, number: Any, share: Share
    ) -> PackedOutputs | None:
        """Returns a replica's outputs from the shared trace, or None if there is none."""
        if self._shared is None:
            return None
        return self._shared(index, total_rows, number, share)

    def _all_reduce(self, local: ReplicaOutputs) -> ReplicaOutputs:
        return all_reduce_outputs(self._strategy, local, self._variables)

    def _on_rows(self, total_rows: tf.Tensor) -> Callable[..., ReplicaOutputs]:
        """Returns a function of a replica's index, a round, its rows in that round, and totals."""

        def compute(index: int, number: Any, share: Share, totals: Totals) -> ReplicaOutputs:
            if not self._has_full_batches:
                return of_rows(index, number, share, totals)
            # Once per process, and not on each replica: the user's code may draw random numbers,
            # count, or call Python.
            if index == 0:
                self._of_first = of_rows(index, number, share, totals)
            is_first = self._strategy.first_replica + index == 0
            zero = 0 if self._in_xla else tf.minimum(share.num_rows, 0)
            return self._of_first.of_full_batch(is_first, zero, here=index > 0)

        def of_rows(index: int, number: Any, share: Share, totals: Totals) -> ReplicaOutputs:
            if not self._in_xla:
                if (packed := self._packed(index, total_rows, number, share)) is not None:
                    return self._unpacked(packed)
                return self._outputs(index, total_rows, number, share, totals)
            is_split = self._strategy.num_replicas * self._num_rounds > 1
            if is_split and not self._has_full_batches:
                share = share._replace(rows=drop_padding(share.rows, share.num_rows))
            if index not in self._compiled:  # one per replica: each captures its own variables
                self._compiled[index] = tf.function(
                    lambda *arguments: self._outputs(index, *arguments),
                    jit_compile=True,
                    autograph=False,
                )
            return self._compiled[index](total_rows, number, share, totals)

        return compute

    def _independent_outputs(
        self, index: tf.Tensor, total_rows: tf.Tensor, number: tf.Tensor, share: Share
    ) -> ReplicaOutputs:
        """Computes a replica's outputs without any exchange with the others.

        Raises:
            NotShareableError: The model needs an exchange in between.
        """

        def refuse(tensors: list) -> list:
            raise NotShareableError(
                f"{len(tensors)} tensors are all-reduced within the forward or backward pass"
            )

        totals = Totals()
        replica = self._replica(index, total_rows, number, share, totals, refuse)
        found = self._compute(replica, share)
        if totals.noted:
            raise NotShareableError(
                f"{len(totals.noted)} totals over all rounds are needed before the gradients"
            )
        return found

    def _outputs(
        self, index: int, total_rows: tf.Tensor, number: Any, share: Share, totals: Totals
    ) -> ReplicaOutputs:
        if self._has_full_batches:
            rows = share.num_rows
            alone = Replica(0, 1, 1, 0, rows, rows, lambda tensors: tensors, in_xla=self._in_xla)
            return self._compute(alone, share)
        all_reduce = self._strategy.all_reduce
        replica = self._replica(index, total_rows, number, share, totals, all_reduce)
        return self._compute(replica, share)

    def _replica(
        self,
        index: int | tf.Tensor,
        total_rows: tf.Tensor,
        number: Any,
        share: Share,
        totals: Totals,
        all_reduce: Callable[[list], list],
    ) -> Replica:
        return Replica(
            index=self._strategy.first_replica + index,
            num_replicas=self._strategy.num_replicas,
            num_rounds=self._num_rounds,
            round=number,
            num_rows=share.num_rows,
            total_rows=total_rows,
            all_reduce=all_reduce,
            totals=totals,
            in_xla=self._in_xla,
            first_row=share.first_row,
        )
