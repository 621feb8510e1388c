"""The shares of a global batch on the replicas of this process, each in one round or in several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.step.forward_backward import Contribution, exchange
from tfdist.step.microbatches import over_rounds
from tfdist.step.one_trace import NotAloneError
from tfdist.step.packed_shares import Packed, PackedShares
from tfdist.step.replica import Replica, Totals
from tfdist.strategies.base import Strategy
from tfdist.strategies.shares import Share
from tfdist.strategies.stand_in import counted


class OnReplicas:
    """Computes what the replicas contribute to a step.

    Args:
        strategy: Of the replicas.
        compute: Returns what rows of a replica contribute.
        num_rounds: In which each replica computes its share.
        in_xla: Whether XLA compiles `compute`, where a replica has variables of its own.
        why_whole: Why each replica is given the whole batch, which it computes as one device
            does, and of which the first one's counts; None: it has a share.
        variables: What gradients in the contributions are of, by place.

    Raises:
        UnsupportedModelError: Whole batches in rounds.
    """

    def __init__(
        self,
        strategy: Strategy,
        compute: Callable[[Replica, Share], Contribution],
        num_rounds: int = 1,
        in_xla: bool = False,
        why_whole: str | None = None,
        variables: Sequence[keras.Variable] = (),
    ) -> None:
        if why_whole and num_rounds > 1:
            raise UnsupportedModelError(
                f"accumulate={num_rounds} cuts a batch into rounds, but it has to be computed "
                f"whole: {why_whole}. Use accumulate=1."
            )
        self._strategy, self._compute, self._num_rounds = strategy, compute, num_rounds
        self._variables = variables
        self._in_xla = in_xla and strategy.has_local_variables
        self._has_whole_batches = why_whole is not None
        self._compiled: dict[int, Callable[..., Contribution]] = {}
        self._by_one_trace: PackedShares | None = None
        fewest, is_alone = strategy.one_trace_from, strategy.num_local_replicas == 1
        if not (fewest is None or is_alone or self._in_xla or why_whole):
            self._by_one_trace = PackedShares(self._alone, variables, fewest)

    def summed(self, total_rows: tf.Tensor, shares: Sequence[Share]) -> Any:
        """Returns the sums over all replicas, on each of them, as `Strategy.run` returns them.

        They are to be `unpacked`.
        """
        run = self._strategy.run
        if self._num_rounds == 1:
            compute = self._on_rows(total_rows)

            def on_replica(i: int) -> Contribution | Packed:
                if (packed := self._packed(i, total_rows, 0, shares[i])) is None:
                    return self._exchange(compute(i, 0, shares[i], Totals()))
                return packed._replace(sent=self._strategy.all_reduce(packed.sent))

            return run(on_replica)
        local = self.local(total_rows, shares)
        return run(lambda i: self._exchange(local[i]))

    def unpacked(self, sums: Contribution | Packed) -> Contribution:
        """Returns the sums that a replica has."""
        if isinstance(sums, Contribution):
            return sums
        if self._by_one_trace is None:
            raise TypeError("packed sums come from one trace alone")
        return self._by_one_trace.unpacked(sums)

    def _packed(
        self, index: int, total_rows: tf.Tensor, number: Any, share: Share
    ) -> Packed | None:
        """Returns what a share contributes, if all replicas can call one function for it."""
        if self._by_one_trace is None:
            return None
        return self._by_one_trace(index, total_rows, number, share)

    def _exchange(self, local: Contribution) -> Contribution:
        return exchange(self._strategy, local, self._variables)

    def local(self, total_rows: tf.Tensor, shares: Sequence[Share]) -> list[Contribution]:
        """Returns what each replica of this process contributes, not yet exchanged."""
        compute = self._on_rows(total_rows)
        if self._num_rounds > 1:
            return over_rounds(self._strategy, compute, shares, self._num_rounds)
        results = self._strategy.run(lambda i: compute(i, 0, shares[i], Totals()))
        return self._strategy.local_results(results)

    def _on_rows(self, total_rows: tf.Tensor) -> Callable[..., Contribution]:
        """Returns a function of a replica, a round, its share of that and totals."""

        def compute(index: int, number: Any, share: Share, totals: Totals) -> Contribution:
            if not self._in_xla:
                if (packed := self._packed(index, total_rows, number, share)) is not None:
                    return self.unpacked(packed)
                return self._contribution(index, total_rows, number, share, totals)
            is_cut = self._strategy.num_replicas * self._num_rounds > 1
            if is_cut and not self._has_whole_batches:
                share = share._replace(rows=counted(share.rows, share.num_rows))
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
    ) -> Contribution:
        """Computes what a share contributes without a word from the others.

        Raises:
            NotAloneError: That cannot be.
        """

        def refuse(tensors: list) -> list:
            raise NotAloneError(f"{len(tensors)} tensors are summed in between.")

        totals = Totals()
        replica = self._replica(index, total_rows, number, share, totals, refuse)
        found = self._compute(replica, share)
        if totals.noted:
            raise NotAloneError(f"{len(totals.noted)} totals are taken over all rounds before.")
        return found

    def _contribution(
        self, index: int, total_rows: tf.Tensor, number: Any, share: Share, totals: Totals
    ) -> Contribution:
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
