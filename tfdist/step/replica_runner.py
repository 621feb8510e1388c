"""The shares of a global batch on the replicas of this process, each in one round or in several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.step.accumulation import over_rounds
from tfdist.step.forward_backward import ReplicaOutputs, exchange
from tfdist.step.replica import Replica, Totals
from tfdist.step.shared_trace import NotShareableError, Packed, PackedRunner
from tfdist.strategies.base import Strategy
from tfdist.strategies.batches import Share, drop_padding


class ReplicaRunner:
    """Computes what the replicas contribute to a step.

    Args:
        strategy: Of the replicas.
        compute: Returns what rows of a replica contribute.
        num_rounds: In which each replica computes its share.
        in_xla: Whether XLA compiles `compute`, where a replica has variables of its own.
        full_batch_reason: Why every replica computes the full batch; None if each computes its
            own part of it.
        variables: What gradients in the contributions are of, by place.

    Raises:
        UnsupportedModelError: Whole batches in rounds.
    """

    def __init__(
        self,
        strategy: Strategy,
        compute: Callable[[Replica, Share], ReplicaOutputs],
        num_rounds: int = 1,
        in_xla: bool = False,
        full_batch_reason: str | None = None,
        variables: Sequence[keras.Variable] = (),
    ) -> None:
        if full_batch_reason and num_rounds > 1:
            raise UnsupportedModelError(
                f"accumulate={num_rounds} cuts a batch into rounds, but it has to be computed "
                f"whole: {full_batch_reason}. Use accumulate=1."
            )
        self._strategy, self._compute, self._num_rounds = strategy, compute, num_rounds
        self._variables = variables
        self._in_xla = in_xla and strategy.has_local_variables
        self._has_whole_batches = full_batch_reason is not None
        self._compiled: dict[int, Callable[..., ReplicaOutputs]] = {}
        self._packed_runner: PackedRunner | None = None
        min_operations, is_alone = strategy.one_trace_from, strategy.num_local_replicas == 1
        if not (min_operations is None or is_alone or self._in_xla or full_batch_reason):
            self._packed_runner = PackedRunner(self._alone, variables, min_operations)

    def summed(self, total_rows: tf.Tensor, shares: Sequence[Share]) -> Any:
        """Returns the sums over all replicas, on each of them, as `Strategy.run` returns them.

        They are to be `unpacked`.
        """
        run = self._strategy.run
        if self._num_rounds == 1:
            compute = self._on_rows(total_rows)

            def on_replica(i: int) -> ReplicaOutputs | Packed:
                if (packed := self._packed(i, total_rows, 0, shares[i])) is None:
                    return self._exchange(compute(i, 0, shares[i], Totals()))
                return packed._replace(sent=self._strategy.all_reduce(packed.sent))

            return run(on_replica)
        local = self.local(total_rows, shares)
        return run(lambda i: self._exchange(local[i]))

    def unpacked(self, sums: ReplicaOutputs | Packed) -> ReplicaOutputs:
        """Returns the sums that a replica has."""
        if isinstance(sums, ReplicaOutputs):
            return sums
        if self._packed_runner is None:
            raise TypeError("packed sums come from one trace alone")
        return self._packed_runner.unpacked(sums)

    def _packed(
        self, index: int, total_rows: tf.Tensor, number: Any, share: Share
    ) -> Packed | None:
        """Returns what a share contributes, if all replicas can call one function for it."""
        if self._packed_runner is None:
            return None
        return self._packed_runner(index, total_rows, number, share)

    def _exchange(self, local: ReplicaOutputs) -> ReplicaOutputs:
        return exchange(self._strategy, local, self._variables)

    def local(self, total_rows: tf.Tensor, shares: Sequence[Share]) -> list[ReplicaOutputs]:
        """Returns what each replica of this process contributes, not yet exchanged."""
        compute = self._on_rows(total_rows)
        if self._num_rounds > 1:
            return over_rounds(self._strategy, compute, shares, self._num_rounds)
        results = self._strategy.run(lambda i: compute(i, 0, shares[i], Totals()))
        return self._strategy.local_results(results)

    def _on_rows(self, total_rows: tf.Tensor) -> Callable[..., ReplicaOutputs]:
        """Returns a function of a replica, a round, its share of that and totals."""

        def compute(index: int, number: Any, share: Share, totals: Totals) -> ReplicaOutputs:
            if not self._in_xla:
                if (packed := self._packed(index, total_rows, number, share)) is not None:
                    return self.unpacked(packed)
                return self._contribution(index, total_rows, number, share, totals)
            is_cut = self._strategy.num_replicas * self._num_rounds > 1
            if is_cut and not self._has_whole_batches:
                share = share._replace(rows=drop_padding(share.rows, share.num_rows))
            if index not in self._compiled:  # one a replica: each captures its own variables
                self._compiled[index] = tf.function(
                    lambda *arguments: self._contribution(index, *arguments),
                    jit_compile=True,
                    autograph=False,
                )
            return self._compiled[index](total_rows, number, share, totals)

        return compute

    def _alone(
        self, index: tf.Tensor, total_rows: tf.Tensor, number: tf.Tensor, share: Share
    ) -> ReplicaOutputs:
        """Computes what a share contributes without a word from the others.

        Raises:
            NotShareableError: That cannot be.
        """

        def refuse(tensors: list) -> list:
            raise NotShareableError(f"{len(tensors)} tensors are summed in between.")

        totals = Totals()
        replica = self._replica(index, total_rows, number, share, totals, refuse)
        found = self._compute(replica, share)
        if totals.noted:
            raise NotShareableError(f"{len(totals.noted)} totals are taken over all rounds before.")
        return found

    def _contribution(
        self, index: int, total_rows: tf.Tensor, number: Any, share: Share, totals: Totals
    ) -> ReplicaOutputs:
        if self._has_whole_batches:
            rows = share.num_rows
            alone = Replica(0, 1, 1, 0, rows, rows, lambda tensors: tensors, in_xla=self._in_xla)
            is_first = self._strategy.first_replica + index == 0
            zero = 0 if self._in_xla else tf.minimum(rows, 0)
            return self._compute(alone, share).of_whole(is_first, zero)
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
        )
