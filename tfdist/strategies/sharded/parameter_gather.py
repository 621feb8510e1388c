"""All-gather of sharded variables, in buckets, for the forward and for the backward pass.

As in ZeRO stage 3 (Rajbhandari et al. 2020, section 5.3), a sharded weight is whole only while its
layer computes: it is gathered before the layer runs, and once more where the backward pass reads
it. Weights that are used one after the other form a bucket. While one bucket computes, the next one
is whole, so that no layer waits, and the one after that is gathered. No more than these three are
in memory: each gather waits until the bucket two before it begins to compute.

Buckets are known only when a pass has been traced. Until then, layers read placeholders, and
TensorFlow's gradient operations read the tensors of the forward pass. Afterwards, these inputs are
replaced by gathered tensors. A gather waits only for tensors that were traced before all operations
that use its weights, so this causes no cycle.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.groups import buckets
from tfdist.groups.fusion import local_sum
from tfdist.upstream.keras_variables import ShardedVariable, joined_together
from tfdist.upstream.tensorflow_graphs import current_graph, exchange_input, without_tapes

#: Operations that read only the size of a tensor, which keeps no elements in memory.
_SIZE_OPERATIONS = ("Shape", "ShapeN", "Size", "Rank")
#: Buckets that are whole, or being gathered, while another one computes. The backward pass uses as
#: many as they are: they are still in memory.
_PREFETCHED = 2


@dataclasses.dataclass(frozen=True)
class GatheredParameter:
    """A sharded variable that is gathered.

    Attributes:
        variable: The variable.
        whole: All of its elements, in the dtype in which they are gathered.
        reads: The tensors that layers compute with, which gradients are taken of.
    """

    variable: ShardedVariable
    whole: tf.Tensor
    reads: list[tf.Tensor] = dataclasses.field(default_factory=list)


class _Use(NamedTuple):
    """An operation that reads a gathered variable.

    Attributes:
        place: Its number among the operations of the pass.
        operation: The operation.
        read: The tensor that it takes, which is to be replaced.
    """

    place: int
    operation: tf.Operation
    read: tf.Tensor


class _Wanted(NamedTuple):
    """A variable to gather.

    Attributes:
        gathered: The variable.
        uses: All operations that read it in this pass, in the order in which they run.
        gate: A tensor that exists when the first of them may run; None: it may run at once.
    """

    gathered: GatheredParameter
    uses: list[_Use]
    gate: tf.Tensor | None


class ParameterGather:
    """Gathers the sharded variables that a replica's forward pass reads."""

    def __init__(
        self,
        graph: tf.Graph | None,
        tape: tf.GradientTape | None,
        bucket_bytes: int | str | None = None,
    ) -> None:
        self._graph, self._tape, self._bucket_bytes = graph, tape, bucket_bytes
        self._gathered: dict[tuple[int, tf.DType], GatheredParameter] = {}
        self._pending: list[_Wanted] = []
        self._inputs: tf.Tensor | None = None  # of the layer that is called now

    def enter(self, inputs: Any) -> None:
        """Notes what a layer is called with, for later gathers to wait for."""
        for leaf in keras.tree.flatten(inputs):
            if isinstance(leaf, tf.Tensor) and getattr(leaf, "graph", None) is self._graph:
                self._inputs = leaf
                return

    def read(self, variable: ShardedVariable) -> tf.Tensor:
        """Returns a variable for a layer, in the dtype in which the layer reads it."""
        dtype = tf.as_dtype(variable.dtype)
        # Inside of a loop, the gradients of all iterations are summed in the dtype that is read.
        if dtype == variable.parts[0].dtype or current_graph() is not self._graph:
            return self.whole(variable)
        # A new tensor for each read, so that gradients are summed in the variable's own dtype.
        gathered = self._gather(variable, dtype)
        return self._noted(gathered, tf.identity(gathered.whole))

    def whole(self, variable: ShardedVariable) -> tf.Tensor:
        """Returns a variable in its own dtype."""
        gathered = self._gather(variable, variable.parts[0].dtype)
        return gathered.reads[0] if gathered.reads else self._noted(gathered, gathered.whole)

    def reads(self, variable: ShardedVariable) -> list[tf.Tensor]:
        """Returns all tensors that were read of a variable."""
        of_variable = [one for (key, _), one in self._gathered.items() if key == id(variable)]
        return [tensor for gathered in of_variable for tensor in gathered.reads]

    def finish(self) -> None:
        """Gathers what was read so far; called in the device scope of the replica."""
        pending, self._pending = self._pending, []
        with without_tapes():
            self._gather_in_buckets(pending, num_kept=0)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Returns a context to compute gradients in; their operations gather variables again."""
        if self._graph is None:
            yield
            return
        self.finish()
        num_before = len(self._graph.get_operations())
        yield
        again = _wanted_again(self._graph, num_before, list(self._gathered.values()))
        with without_tapes():
            self._gather_in_buckets(again, num_kept=_PREFETCHED)

    def _gather(self, variable: ShardedVariable, dtype: tf.DType) -> GatheredParameter:
        key = (id(variable), dtype)
        if key not in self._gathered:
            with ExitStack() as stack:
                # With a tape, TensorFlow would run a part of the gradient of Horovod's operation
                # while it traces.
                stack.enter_context(without_tapes())
                if current_graph() is not self._graph:  # but that of a loop
                    outside = tf.init_scope() if self._graph is None else self._graph.as_default()
                    stack.enter_context(outside)
                if self._graph is None:
                    gathered = GatheredParameter(variable, variable.joined(dtype))
                else:
                    awaited = tf.raw_ops.Placeholder(dtype=dtype, shape=variable.shape)
                    gathered = GatheredParameter(variable, tf.identity(awaited))
                    use = _Use(len(self._pending), gathered.whole.op, awaited)
                    self._pending.append(_Wanted(gathered, [use], self._inputs))
                self._gathered[key] = gathered
        return self._gathered[key]

    def _noted(self, gathered: GatheredParameter, tensor: tf.Tensor) -> tf.Tensor:
        if self._tape is not None and gathered.variable.trainable:
            self._tape.watch(tensor)
        gathered.reads.append(tensor)
        return tensor

    def _gather_in_buckets(self, wanted: Sequence[_Wanted], num_kept: int) -> None:
        """Gathers variables, and makes their uses read what was gathered.

        Args:
            wanted: The variables, in the order of their first use.
            num_kept: Number of buckets at the beginning that are in memory already.
        """
        sizes = [buckets.size_of(one.gathered.whole) for one in wanted]
        in_buckets = buckets.consecutive(wanted, sizes, self._bucket_bytes or "auto")
        gates = [bucket[0].gate for bucket in in_buckets]
        for number, bucket in enumerate(in_buckets):
            if number < num_kept:
                continue
            gate = gates[number - _PREFETCHED] if number >= _PREFETCHED else None
            with tf.control_dependencies([] if gate is None else [gate]):
                wholes = joined_together(
                    [(one.gathered.variable, one.gathered.whole.dtype) for one in bucket]
                )
            for one, whole in zip(bucket, wholes, strict=True):
                for use in one.uses:
                    exchange_input(use.operation, use.read, whole)


def total_gradient(gradients: list[Any], variable: ShardedVariable) -> Any:
    """Returns the gradient of a variable from those of all tensors read of it, or None."""
    terms = [tf.cast(g, variable.parts[0].dtype) for g in gradients if g is not None]
    slices = [gradient for gradient in terms if isinstance(gradient, tf.IndexedSlices)]
    if slices:  # which the strategy refuses, with the name of the variable
        return slices[0]
    return local_sum(terms) if terms else None


def _wanted_again(
    graph: tf.Graph, num_before: int, gathered: Sequence[GatheredParameter]
) -> list[_Wanted]:
    """Returns the variables that the operations of the backward pass read, by first use."""
    if not gathered:
        return []
    operations = enumerate(graph.get_operations())
    backward = {one.name: index for index, one in operations if index >= num_before}
    with_uses = [(one, uses) for one in gathered if (uses := _uses(one, backward))]
    wanted: list[_Wanted] = []
    for one, uses in sorted(with_uses, key=lambda pair: pair[1][0].place):
        # Other gathers wait for a gradient that the first operation takes.
        first, otherwise = uses[0], wanted[-1].gate if wanted else None
        inputs = (t for t in first.operation.inputs if t is not first.read)
        gate = next((t for t in inputs if t.op.name in backward), otherwise)
        wanted.append(_Wanted(one, uses, gate))
    return wanted


def _uses(gathered: GatheredParameter, backward: Mapping[str, int]) -> list[_Use]:
    """Returns the backward operations that read a variable, in the order in which they run."""
    reads = list(gathered.reads)
    for read in reads:  # grows: a custom gradient keeps an identity of what it reads
        reads += [
            consumer.outputs[0]
            for consumer in read.consumers()
            if consumer.type == "Identity" and consumer.name not in backward
        ]
    uses = [
        _Use(backward[consumer.name], consumer, read)
        for read in reads
        for consumer in read.consumers()
        if consumer.name in backward and consumer.type not in _SIZE_OPERATIONS
    ]
    return sorted(uses, key=operator.attrgetter("place"))
