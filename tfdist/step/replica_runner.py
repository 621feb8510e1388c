"""Runs forward and backward pass on the replicas of this process, in one round or in several."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.patches.sizes_on_host import with_sizes_on_host
from tfdist.replica.replica import Replica, Totals
from tfdist.step.accumulation import over_rounds
from tfdist.step.forward_backward import ReplicaOutputs, all_reduce_outputs
from tfdist.step.shared_trace import NotShareableError, Packing, SharedTrace
from tfdist.step.state import Changes
from tfdist.strategies.base import Strategy
from tfdist.strategies.batches import Share, drop_padding
from tfdist.upstream.tensorflow_random import RandomStates

#: (replica, rows of the global batch, round, the replica's rows in that round, totals) -> outputs
Compute = Callable[[int, tf.Tensor, Any, Share, Totals], ReplicaOutputs]


class ReplicaRunner:
    """Computes the outputs of all replicas for a step, and sums them.

    Args:
        strategy: Runs the replicas.
        model: If it has `jit_compile`, and the replica variables of its own, XLA compiles
            `compute`. If it has many weights, all replicas share one trace.
        compute: Returns the outputs of a replica for its rows.
        num_rounds: Number of rounds in which each replica computes its batch.
        full_batch_reason: Why every replica computes the full batch, of which only the first
            replica's results count; None if each computes its own part of it.
        variables: The variables that `ReplicaOutputs.gradients` numbers by place.

    Attributes:
        refused_by_xla: Why forward and backward pass are without XLA although the model asks.

    Raises:
        UnsupportedModelError: Full-batch mode with several rounds.
    """

    def __init__(
        self,
        strategy: Strategy,
        model: keras.Model,
        compute: Callable[[Replica, Share], ReplicaOutputs],
        num_rounds: int,
        full_batch_reason: str | None,
        variables: Sequence[keras.Variable] = (),
    ) -> None:
        if full_batch_reason and num_rounds > 1:
            raise UnsupportedModelError(
                f"accumulate={num_rounds} splits a batch into rounds, but this model needs the "
                f"full batch: {full_batch_reason}. Use accumulate=1."
            )
        self._strategy, self._num_rounds, self._variables = strategy, num_rounds, variables
        one_trace_from = strategy.one_trace_from
        is_large = one_trace_from is not None and len(model.weights) >= one_trace_from
        self._shares_trace = is_large and strategy.num_local_replicas > 1
        self._packing: Packing | None = None
        self.refused_by_xla = refused = list[str]()
        self._in_xla = in_xla = bool(model.jit_compile and strategy.variables.are_local)
        self._is_one_program = in_xla and strategy.num_replicas * num_rounds == 1
        on_host = with_sizes_on_host(compute)

        def on_rows(
            index: Any, total_rows: Any, number: Any, share: Share, totals: Totals,
            all_reduce: Callable[[list], list] = strategy.all_reduce, in_xla: bool = False,
        ) -> ReplicaOutputs:  # fmt: skip
            rows, call = share.num_rows, compute if in_xla else on_host
            if full_batch_reason:
                alone = Replica(0, 1, 1, 0, rows, rows, lambda tensors: tensors, in_xla=in_xla)
                return call(alone, share)
            replica = Replica(
                strategy.first_replica + index, strategy.num_replicas, num_rounds, number,
                rows, total_rows, all_reduce, totals, in_xla, share.first_row,
            )  # fmt: skip
            return call(replica, share)

        # What a replica computes, by the ways in which it may be computed, from inside to outside.
        self._compute: Compute = functools.partial(on_rows, in_xla=self._is_one_program)
        if in_xla and not self._is_one_program:
            if num_rounds == 1 and not full_batch_reason and strategy.exchange.wire_dtype is None:
                self._packing = Packing()
            inside = _without_exchange(functools.partial(on_rows, in_xla=True))
            self._compute = _in_xla(inside, on_rows, not full_batch_reason, self._packing, refused)
        elif self._shares_trace and not in_xla and not full_batch_reason:
            self._packing = Packing()
            self._compute = _by_shared_trace(_without_exchange(on_rows), on_rows, self._packing)
        if full_batch_reason:
            self._compute = _on_first_replica(self._compute, strategy, in_xla)

    def all_reduced(self, total_rows: tf.Tensor, shares: Sequence[Share]) -> Any:
        """Returns the sums over all replicas, on each of them, in the form of `Strategy.run`."""
        strategy, variables = self._strategy, self._variables
        if self._num_rounds > 1:
            local = self.local(total_rows, shares)
            return strategy.run(lambda i: all_reduce_outputs(strategy, local[i], variables))

        def on_replica(i: int) -> ReplicaOutputs:
            outputs = self._compute(i, total_rows, 0, shares[i], Totals())
            return all_reduce_outputs(strategy, outputs, variables)

        return strategy.run(on_replica)

    def local(self, total_rows: tf.Tensor, shares: Sequence[Share]) -> list[ReplicaOutputs]:
        """Returns the outputs of each replica of this process, before any all-reduce."""

        def compute(index: int, number: Any, share: Share, totals: Totals) -> ReplicaOutputs:
            return self._unpacked(self._compute(index, total_rows, number, share, totals))

        if self._num_rounds > 1:
            return over_rounds(self._strategy, compute, shares, self._num_rounds)
        results = self._strategy.run(lambda i: compute(i, 0, shares[i], Totals()))
        return self._strategy.local_results(results)

    def in_one_program(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a whole step as one program of XLA, if one replica makes it and the model asks.

        Args:
            step: Takes what `all_reduced` takes.
        """
        if not self._is_one_program:
            return step
        return tf.function(step, jit_compile=True, autograph=False)

    def update_function(
        self, apply: Callable[[ReplicaOutputs], tf.Tensor], share_trace: bool = False
    ) -> Callable[[ReplicaOutputs], tf.Tensor]:
        """Returns a function for `Strategy.update` that applies the sums of `all_reduced`.

        Args:
            apply: Updates one copy of the variables from the sums.
            share_trace: Whether to trace it once for all replicas if the model has many weights,
                or to compile it if the model asks for XLA.
        """

        def update(sums: ReplicaOutputs) -> tf.Tensor:
            return apply(self._unpacked(sums))

        if share_trace and self._in_xla and not self._is_one_program:
            # Traced for each replica, whose variables it captures.
            return lambda sums: tf.function(update, jit_compile=True, autograph=False)(sums)
        if not (share_trace and self._shares_trace):
            return update
        shared = SharedTrace(update, writes=True)

        def update_by_shared_trace(sums: ReplicaOutputs) -> tf.Tensor:
            done = None if tf.executing_eagerly() else shared(sums)
            return update(sums) if done is None else done

        return update_by_shared_trace

    def _unpacked(self, outputs: ReplicaOutputs) -> ReplicaOutputs:
        outputs = self._packing.unpacked(outputs) if self._packing else outputs
        return outputs.with_static_shapes(self._variables)


def _in_xla(
    compute: Callable[..., ReplicaOutputs],
    otherwise: Compute,
    without_padding: bool,
    packing: Packing | None,
    refused: list[str],
) -> Compute:
    """Compiles a function by XLA, which gets batches without padding and returns few tensors.

    Nothing is exchanged within a program: if `compute` raises `NotShareableError`, `otherwise`
    takes its place, and `refused` gets the error.
    """

    def packed(*arguments: Any) -> ReplicaOutputs:
        outputs = compute(*arguments)
        return packing.packed(outputs) if packing else outputs

    @functools.cache
    def program(index: int) -> Callable[..., ReplicaOutputs]:  # captures the replica's variables
        return tf.function(functools.partial(packed, index), jit_compile=True, autograph=False)

    def in_xla(
        index: int, total_rows: tf.Tensor, number: Any, share: Share, totals: Totals
    ) -> ReplicaOutputs:
        if refused:
            return otherwise(index, total_rows, number, share, totals)
        rows = drop_padding(share.rows, share.num_rows) if without_padding else share.rows
        states = RandomStates.current()
        try:
            return program(index)(total_rows, number, share._replace(rows=rows))
        except NotShareableError as error:
            refused.append(str(error))
            warnings.warn(
                "jit_compile=True is ignored in the forward and backward pass, whose random "
                "numbers are those of jit_compile=False, because this model's loss, metrics or "
                "BatchNorm need an all-reduce within them, which XLA cannot compile.",
                stacklevel=2,
            )
        states.restore()
        return otherwise(index, total_rows, number, share, totals)

    return in_xla


def _without_exchange(compute: Callable[..., ReplicaOutputs]) -> Callable[..., ReplicaOutputs]:
    """Returns a function that raises `NotShareableError` where a replica needs the others."""

    def refuse(tensors: list) -> Any:
        raise NotShareableError(f"{len(tensors)} tensors are sums over all replicas or rounds")

    def alone(index: Any, total_rows: Any, number: Any, share: Share) -> ReplicaOutputs:
        totals = Totals()
        outputs = compute(index, total_rows, number, share, totals, refuse)
        return refuse(totals.noted) if totals.noted else outputs

    return alone


def _by_shared_trace(
    compute: Callable[..., ReplicaOutputs], otherwise: Compute, packing: Packing
) -> Compute:
    """Computes by one trace for all replicas, or by `otherwise` where each needs its own."""
    trace = SharedTrace(lambda *arguments: packing.packed(compute(*arguments)))

    def by_trace(
        index: int, total_rows: tf.Tensor, number: Any, share: Share, totals: Totals
    ) -> ReplicaOutputs:
        if not tf.executing_eagerly():
            outputs = trace(tf.constant(index), total_rows, tf.convert_to_tensor(number), share)
            if outputs is not None:
                return outputs
        return otherwise(index, total_rows, number, share, totals)

    return by_trace


def _on_first_replica(compute: Compute, strategy: Strategy, in_xla: bool) -> Compute:
    """Computes the full batch once per process: the first replica of all adds it to the sums.

    The user's code may draw random numbers, count, or call Python.
    """
    outputs = ReplicaOutputs({}, Changes({}, {}, {}), Changes({}, {}, {}))

    def on_first(
        index: int, total_rows: tf.Tensor, number: Any, share: Share, totals: Totals
    ) -> ReplicaOutputs:
        nonlocal outputs
        if index == 0:
            outputs = compute(index, total_rows, number, share, totals)
        zero = 0 if in_xla else tf.minimum(share.num_rows, 0)
        return outputs.of_full_batch(strategy.first_replica + index == 0, zero, here=index > 0)

    return on_first
