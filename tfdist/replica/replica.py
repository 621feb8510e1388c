"""One replica's view of a step: its rows of the global batch, and sums over all replicas."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.precision import LossScale
from tfdist.strategies import batches
from tfdist.strategies.batches import has_rows

_local = threading.local()


def current() -> Replica | None:
    """Returns the replica whose forward pass is being traced in this thread."""
    return getattr(_local, "replica", None)


@dataclass(eq=False)
class Totals:
    """Sums over all rounds of an accumulating step, taken in a pass ahead of the gradients.

    In that pass a replica appends the terms of its round to `noted`. In the second pass it takes
    the totals from `known`, in the same order. With one round both stay unused.
    """

    noted: list[tf.Tensor] = field(default_factory=list)
    known: list[tf.Tensor] | None = None
    _next: int = 0

    def take(self, num: int) -> list[tf.Tensor]:
        """Returns the next `num` known totals."""
        known_totals = (self.known or [])[self._next : self._next + num]
        self._next += num
        return known_totals


@dataclass
class Replica:
    """A replica in one round of a step.

    Attributes:
        index: Number of the replica, from 0: a Python int, or int32 in a shared trace.
        num_replicas: Number of replicas over all workers.
        num_rounds: Rounds of accumulation in the step.
        round: Number of this round: int32, or a Python int.
        num_rows: Rows of this replica in this round, int32 scalar. May be 0; then there is one
            row of padding.
        total_rows: Rows of the global batch, over all replicas and rounds, int32 scalar.
        all_reduce: Sums a list of tensors over the replicas.
        totals: Source of sums over several rounds.
        in_xla: Whether this is traced into an XLA cluster, in which nothing can be exchanged.
        first_row: Position of its first row in the global batch, int64 scalar; selects its rows of
            a random draw.
    """

    index: int | tf.Tensor
    num_replicas: int
    num_rounds: int
    round: int | tf.Tensor
    num_rows: tf.Tensor
    total_rows: tf.Tensor
    all_reduce: Callable[[list], list]
    totals: Totals = field(default_factory=Totals)
    in_xla: bool = False
    first_row: tf.Tensor | int = 0

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches in the global batch: one per replica and round."""
        return self.num_replicas * self.num_rounds

    @property
    def microbatch(self) -> int | tf.Tensor:
        """Number of this microbatch, from 0: a different one in each round and replica."""
        return self.round * self.num_replicas + self.index

    @property
    def fraction(self) -> tf.Tensor:
        """Fraction of the global batch's rows that are in this microbatch, float64."""
        return tf.cast(self.num_rows, tf.float64) / tf.cast(self.total_rows, tf.float64)

    def drop_padding(self, structure: Any) -> Any:
        """Returns rows, or what was computed from them, without padding.

        XLA has no slices of unknown size, and gets batches without padding.
        """
        if self.num_microbatches == 1 or self.in_xla:
            return structure
        return batches.drop_padding(structure, self.num_rows)

    def by_rows(self, value: tf.Tensor) -> tf.Tensor:
        """Returns a mean, or a value that all replicas have, times its `fraction` of the rows."""
        return value * tf.cast(self.fraction, value.dtype)

    def if_counted(self, value: tf.Tensor, otherwise: tf.Tensor | None = None) -> tf.Tensor:
        """Returns what was computed from this replica's rows, or a replacement if it has none."""
        if self.num_microbatches == 1:
            return value
        return tf.where(
            self.num_rows > 0, value, tf.zeros_like(value) if otherwise is None else otherwise
        )

    def beside_others(self, value: tf.Tensor) -> tf.Tensor:
        """Returns a value in a row of its own, with rows of zeros for all other microbatches.

        The sum over replicas and rounds has the values of all of them.
        """
        shape = [self.num_microbatches, *value.shape]
        return tf.scatter_nd([[self.microbatch]], self.if_counted(value)[None], shape)

    def __enter__(self) -> Replica:
        _local.replica = self
        return self

    def __exit__(self, *exception: object) -> None:
        _local.replica = None

    @contextmanager
    def full_batch(self) -> Iterator[None]:
        """Returns a context for computing with the gathered rows of the global batch.

        In it, random numbers are those of the global batch, alike on every replica, and not those
        of this replica's rows.
        """
        _local.replica = None
        yield
        _local.replica = self

    def sum(self, terms: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums scalars over the global batch; no gradient flows through them."""
        terms = [tf.stop_gradient(term) for term in terms]
        if self.num_rounds == 1:
            return self.all_reduce(terms)
        if self.totals.known is None:
            self.totals.noted += terms
            return terms
        return self.totals.take(len(terms))

    def sum_through(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums tensors over the replicas, and their gradients in the backward pass."""
        if self.num_replicas == 1 or not tensors:
            return tensors

        def backward(*upstream: tf.Tensor) -> list[tf.Tensor]:
            return self.all_reduce([self.if_counted(gradient) for gradient in upstream])

        @tf.custom_gradient
        def forward(*terms: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list]]:
            return _with_own_gradient(self.all_reduce(list(terms))), backward

        return tf.nest.flatten(forward(*tensors))

    def gather(self, structure: Any) -> Any:
        """Concatenates the rows of all replicas: the global batch, on every replica.

        This is for a loss that every replica computes from the global batch and counts as 1/N.
        The gradient of a replica's rows is multiplied by N, so that the sum over the replicas is
        right.

        Raises:
            UnsupportedModelError: There are several rounds, or the batch holds strings.
        """
        if self.num_rounds > 1:
            raise UnsupportedModelError(
                "accumulate=N needs a loss and metrics that are sums over rows, but a loss or "
                "metric of this model needs the full batch (compute_loss is overridden, or it "
                "returns one number per batch). Use accumulate=1."
            )
        if self.num_replicas == 1:
            return structure
        structure = self.drop_padding(structure)
        counts = tf.one_hot(self.index, self.num_replicas, self.num_rows, dtype=tf.int32)
        begin = tf.cumsum(self.all_reduce([counts])[0], exclusive=True)[self.index]
        leaves = tf.nest.flatten(structure)
        tensors = [leaf for leaf in leaves if has_rows(leaf)]
        if any(t.dtype == tf.string or not isinstance(t, tf.Tensor) for t in tensors):
            raise UnsupportedModelError(
                "A loss over the full batch needs dense numbers, but the batch holds strings, "
                "ragged or sparse tensors. Encode them first, or use one device."
            )
        whole = iter(self._gather_floats(tensors, begin))
        return tf.nest.pack_sequence_as(
            structure, [next(whole) if has_rows(leaf) else leaf for leaf in leaves]
        )

    def _gather_floats(self, tensors: list[tf.Tensor], begin: tf.Tensor) -> list[tf.Tensor]:
        """Sums the rows of all replicas, each padded with zeros to their place in the batch."""

        @tf.custom_gradient
        def forward(*shares: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list]]:
            around = [begin, self.total_rows - begin - self.num_rows]
            padded = [tf.pad(x, [around] + [[0, 0]] * (x.shape.rank - 1)) for x in shares]

            def backward(*upstream: tf.Tensor | None) -> list[tf.Tensor | None]:
                end = begin + self.num_rows
                return [
                    None
                    if gradient is None
                    else self.num_replicas * tf.convert_to_tensor(gradient)[begin:end]
                    for gradient in upstream
                ]

            return _with_own_gradient(self.all_reduce(padded)), backward

        numbers = [tf.cast(t, tf.int32) if t.dtype == tf.bool else t for t in tensors]
        whole = tf.nest.flatten(forward(*numbers))
        for tensor, share in zip(whole, tensors, strict=True):
            tensor.set_shape([None, *share.shape[1:]])
        return [tf.cast(w, share.dtype) for w, share in zip(whole, tensors, strict=True)]


def _with_own_gradient(sums: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the results of a function with a custom gradient, without any other gradient.

    TensorFlow searches everything that has a gradient for variables. Behind an all-reduce it would
    walk the whole graph of the other replicas, once for each layer with an all-reduce.
    """
    return [tf.stop_gradient(total) for total in sums]


@dataclass(frozen=True)
class StepOptions:
    """The arguments of a `Trainer` that say how its steps compute.

    Attributes:
        accumulate: Number of rounds in which a training step computes its batch.
        sync_batch_norm: Whether BatchNorm uses the moments of the global batch in training.
        precision: Name of the dtype policy to build the model with; None for Keras's global one.
        loss_scale: How the loss scale changes; None for the optimizer's own rule.
        remat: The layers to rematerialize, as in `Trainer(remat=...)`.
        replica_random: Whether each replica draws its own random numbers.
        gradient_norm: Whether a training step logs the global norm of its gradients.
        offload_activations: Whether activations are on the host until the backward pass.
    """

    accumulate: int = 1
    sync_batch_norm: bool = False
    precision: str | None = None
    loss_scale: LossScale | None = None
    remat: str = "none"
    replica_random: bool = False
    gradient_norm: bool = False
    offload_activations: bool = False
