"""The compiled functions that compute a model's outputs.

The outputs of all workers, on each of them: each sends those of its shares once a call.

They cross as they are, to the bit: numbers of every dtype, strings, ragged and sparse ones.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.groups import array_bytes
from tfdist.loops.data_handler import DataHandler
from tfdist.strategies.base import Strategy
from tfdist.strategies.inner_loop import LoopResult
from tfdist.upstream.keras_model import global_generator, use_global_generator
from tfdist.upstream.keras_variables import values_of


class Own(NamedTuple):
    """What one worker has computed in some steps."""

    pieces: list[Any]  # structures of tensors, as many a step, in the order of the rows
    num_steps: int
    counts: np.ndarray | None = None  # where one piece holds all steps: of each its outputs' rows


#: Computes the outputs for up to that many batches of an iterator: what was done, and the outputs
#: in pieces that laid end to end are in the order of the rows.
OutputsFn = Callable[[Iterator[Any], int], tuple[LoopResult, list[Any]]]

#: The same for the shares of this process alone: what was done, and its outputs, step by step.
OwnFn = Callable[[Iterator[Any], int], tuple[LoopResult, Own]]


class Outputs:
    """Traces what computes outputs, once for shares and once for whole batches.

    Args:
        model: Built, in the strategy's scope.
        strategy: Of its replicas.
    """

    def __init__(self, model: keras.Model, strategy: Strategy) -> None:
        self._model, self._strategy = model, strategy
        self._of_one: dict[tuple[bool, bool], Any] = {}
        self._of_many: dict[tuple[bool, bool], Any] = {}
        self._read: list[weakref.ref[tf.Variable]] = []

    @property
    def made(self) -> bool:
        """Whether there is one yet."""
        return bool(self._of_one)

    def function(self, feed: DataHandler, whole: bool) -> OutputsFn:
        """Returns the function that computes the outputs for some batches.

        Args:
            feed: Of the batches.
            whole: Whether every replica is given whole batches.
        """
        self._forget_what_reads_others()
        own = self._own(feed, whole)
        # Of whole batches every worker has all outputs by itself.
        crosses = self._strategy.stops_together and not whole

        def predict(iterator: Iterator[Any], num_steps: int) -> tuple[LoopResult, list[Any]]:
            with self._strategy.collective_section():
                made, outputs = own(iterator, num_steps)
                if not crosses:
                    return made, outputs.pieces
                return made, of_all(self._strategy, outputs)

        return predict

    def _forget_what_reads_others(self) -> None:
        """Gives up functions of variables that are no longer the model's: cut, moved, or joined.

        A training does so that begins after the first prediction; no function keeps them alive.
        """
        own = [value for variable in self._model.variables for value in values_of(variable)]
        pairs = itertools.zip_longest((known() for known in self._read), own)
        if any(known is not value for known, value in pairs):
            self._of_one.clear()
            self._of_many.clear()
            self._read = [*map(weakref.ref, own)]

    def _own(self, feed: DataHandler, whole: bool) -> OwnFn:
        """Returns what computes the outputs for this process's shares."""
        of_one: Any = functools.partial(self._of_next, whole, feed.own_rows)
        if self._model.run_eagerly:
            return self._one_by_one(of_one, feed)
        key = whole, feed.own_rows
        if key not in self._of_one:
            self._of_one[key] = tf.function(of_one, reduce_retracing=True, autograph=False)
            counts = self._strategy.stops_together
            many = functools.partial(_outputs_of_many, self._of_one[key], counts)
            self._of_many[key] = tf.function(many, reduce_retracing=True, autograph=False)
        one_by_one = self._one_by_one(self._of_one[key], feed)
        if feed.may_end or feed.own_rows:
            return one_by_one
        return self._in_graph(self._of_one[key], self._of_many[key], one_by_one)

    def _in_graph(self, of_one: Any, of_many: Any, one_by_one: OwnFn) -> OwnFn:
        """Returns what takes many batches in one call, where an array can hold their outputs."""

        def predict(iterator: Iterator[Any], num_steps: int) -> tuple[LoopResult, Own]:
            if num_steps == 1 or not _fit_in_arrays(_pieces(of_one, iterator)):
                return one_by_one(iterator, num_steps)
            rows, checksum, outputs, counts = of_many(iterator, tf.constant(num_steps))
            made = LoopResult(num_steps, int(rows), 0.0, int(checksum))
            return made, Own([outputs], num_steps, np.asarray(counts))

        return predict

    def _one_by_one(self, of_one: Any, feed: DataHandler) -> OwnFn:
        """Returns what takes a batch a call, until the data end."""
        # Batches without rows follow, which nobody may leave while others have some.
        ends_without_rows = feed.own_rows and self._strategy.stops_together

        def predict(iterator: Iterator[Any], num_steps: int) -> tuple[LoopResult, Own]:
            num_made, num_rows, mixture, outputs = 0, 0, 0, list[Any]()
            for _ in range(num_steps):
                try:
                    rows, checksum, by_replica = of_one(iterator)
                except (StopIteration, tf.errors.OutOfRangeError):
                    break
                if ends_without_rows and rows == 0:
                    break
                num_made, num_rows = num_made + 1, num_rows + int(rows)
                mixture += int(checksum)
                outputs.extend(by_replica)
            return LoopResult(num_made, num_rows, 0.0, mixture), Own(outputs, num_made)

        return predict

    def _of_next(
        self, whole: bool, own_rows: bool, iterator: Any
    ) -> tuple[tf.Tensor, tf.Tensor, list[Any]]:
        """The rows and the checksum of the next global batch, and the outputs for its shares."""
        generator = global_generator()

        def on_rows(rows: Any) -> Any:
            if generator is not None:
                use_global_generator(generator)
            return self._model.predict_step(rows)

        element = self._strategy.received(next(iterator), own_rows)
        outputs = self._strategy.outputs(on_rows, element, whole)
        return element.num_rows, element.checksum, outputs


def _pieces(of_one: Any, iterator: Any) -> list[Any]:
    """What the function of one batch returns of each replica, as traced."""
    return of_one.get_concrete_function(iterator).structured_outputs[2]


def _fit_in_arrays(pieces: list[Any]) -> bool:
    """Whether outputs are dense tensors that differ by their numbers of rows alone."""
    return all(
        isinstance(one, tf.Tensor) and one.shape.rank and None not in one.shape[1:]
        for one in keras.tree.flatten(pieces)
    )


def _outputs_of_many(
    of_one: Any, counts: bool, iterator: Any, num_steps: tf.Tensor
) -> tuple[Any, Any, Any, Any]:
    """The rows and checksum of some batches, and their outputs laid end to end in host memory.

    Args:
        of_one: The function of one batch, as `Outputs` traces it.
        counts: Whether to return how many rows each output has of each batch, too: int32, a row a
            batch. Otherwise there are none.
        iterator: Has as many batches.
        num_steps: Of how many; int32 scalar.
    """
    pieces = _pieces(of_one, iterator)
    size = num_steps * len(pieces)

    def step(number: tf.Tensor, rows: tf.Tensor, checksum: tf.Tensor, arrays: list) -> tuple:
        own_rows, own_checksum, outputs = of_one(iterator)
        by_leaf = list(zip(*map(keras.tree.flatten, outputs), strict=True))
        with tf.device("CPU:0"):
            for i in range(len(pieces)):
                at = number * len(pieces) + i
                written = [a.write(at, leaf[i]) for a, leaf in zip(arrays, by_leaf, strict=False)]
                arrays = written + arrays[len(by_leaf) :]
            if counts:
                own = tf.stack([sum(tf.shape(piece)[0] for piece in leaf) for leaf in by_leaf])
                arrays[-1] = arrays[-1].write(number, own)
        rows += tf.cast(own_rows, tf.int64)
        return number + 1, rows, checksum + own_checksum, arrays

    leaves = keras.tree.flatten(pieces[0])
    with tf.device("CPU:0"):
        arrays = [
            tf.TensorArray(one.dtype, size, infer_shape=False, element_shape=one.shape)
            for one in leaves
        ]
        if counts:
            arrays.append(tf.TensorArray(tf.int32, num_steps, element_shape=[len(leaves)]))
    zero = tf.constant(0, tf.int64)
    # Not two at a time: workers join weights that they have in parts in the order of the batches.
    _, rows, checksum, arrays = tf.while_loop(
        lambda number, *_: number < num_steps, step, (0, zero, zero, arrays), parallel_iterations=1
    )
    with tf.device("CPU:0"):
        whole = [a.concat() for a in arrays[: len(leaves)]]
        own = arrays[-1].stack() if counts else tf.zeros([0, len(leaves)], tf.int32)
    return rows, checksum, keras.tree.pack_sequence_as(pieces[0], whole), own


#: Outputs as arrays, or ragged or sparse tensors, in the order in which a structure has them.
Leaves = list[Any]


def of_all(strategy: Strategy, own: Own) -> list[Any]:
    """Returns outputs that laid end to end are those of the global batches, in order.

    Args:
        strategy: By which the workers exchange them; all of them call this.
        own: Of this worker.
    """
    if own.counts is None:
        own = _joined(own)
    gathered = strategy.group.gather_bytes(array_bytes.packed(_arrays(own)))
    if any(part.size == 0 for part in gathered):
        return own.pieces  # nobody has any; or only some have, which the loop will say
    like = own.pieces[0]
    by_worker = [_by_step(array_bytes.unpacked(part), like) for part in gathered]
    if len(set(map(len, by_worker))) > 1:
        return own.pieces  # likewise
    in_order = [
        leaves for step in zip(*by_worker, strict=True) for group in step for leaves in group
    ]
    if _differ_by_rows(in_order):
        in_order = [[np.concatenate(column) for column in zip(*in_order, strict=True)]]
    return [_as_tensors(like, leaves) for leaves in in_order]


def _joined(own: Own) -> Own:
    """Lays pieces end to end where they are arrays that differ by their numbers of rows alone."""
    pieces = [[_as_array(leaf) for leaf in keras.tree.flatten(piece)] for piece in own.pieces]
    if not pieces or not _differ_by_rows(pieces):
        return own
    rows = np.array([[len(leaf) for leaf in leaves] for leaves in pieces])
    counts = rows.reshape(own.num_steps, -1, len(pieces[0])).sum(1)
    whole = [np.concatenate(column) for column in zip(*pieces, strict=True)]
    return Own([keras.tree.pack_sequence_as(own.pieces[0], whole)], own.num_steps, counts)


def _arrays(own: Own) -> list[np.ndarray]:
    """What a worker sends: `Own.counts`, or else how many steps there are; and the pieces."""
    if not own.pieces:
        return []
    head = np.array(own.num_steps) if own.counts is None else own.counts
    leaves = keras.tree.flatten(own.pieces)
    return [head.astype(np.int64), *(array for leaf in leaves for array in _components(leaf))]


def _by_step(arrays: list[np.ndarray], like: Any) -> list[list[Leaves]]:
    """The pieces of each step of what a worker has sent."""
    head, *rest = arrays
    components = iter(rest)
    leaves = keras.tree.flatten(like)
    if head.ndim:
        ends = np.cumsum(head, 0)[:-1]
        parts = [np.split(next(components), ends[:, i]) for i in range(len(leaves))]
        return [[list(step)] for step in zip(*parts, strict=True)]
    pieces = list[Leaves]()
    while (first := next(components, None)) is not None:
        own = iter([first, *(next(components) for _ in range(sum(map(_size, leaves)) - 1))])
        pieces.append([_put_together(leaf, own) for leaf in leaves])
    a_step = len(pieces) // int(head)
    return [pieces[i : i + a_step] for i in range(0, len(pieces), a_step)]


def _differ_by_rows(pieces: list[Leaves]) -> bool:
    """Whether all are arrays of the same shapes but for the numbers of rows."""
    return all(
        all(isinstance(one, np.ndarray) and one.ndim for one in column)
        and len({one.shape[1:] for one in column}) == 1
        for column in zip(*pieces, strict=True)
    )


def _as_array(leaf: Any) -> Any:
    return leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf


def _as_tensors(like: Any, leaves: Leaves) -> Any:
    """A structure of tensors, of the dtypes of another."""
    tensors = [
        tf.convert_to_tensor(leaf, one.dtype) if isinstance(leaf, np.ndarray) else leaf
        for leaf, one in zip(leaves, keras.tree.flatten(like), strict=True)
    ]
    return keras.tree.pack_sequence_as(like, tensors)


def _components(leaf: Any) -> list[np.ndarray]:
    """The arrays that make an output."""
    parts = [leaf]
    if isinstance(leaf, tf.RaggedTensor):
        parts = [leaf.flat_values, *leaf.nested_row_splits]
    elif isinstance(leaf, tf.SparseTensor):
        parts = [leaf.indices, leaf.values, leaf.dense_shape]
    return [np.asarray(_as_array(part)) for part in parts]


def _size(like: Any) -> int:
    """How many arrays make an output."""
    if isinstance(like, tf.RaggedTensor):
        return 1 + like.ragged_rank
    return 3 if isinstance(like, tf.SparseTensor) else 1


def _put_together(like: Any, components: Iterator[np.ndarray]) -> Any:
    """An output of the kind of another, of as many arrays as make it."""
    arrays = [next(components) for _ in range(_size(like))]
    if isinstance(like, tf.RaggedTensor):
        values = tf.convert_to_tensor(arrays[0], like.dtype)
        return tf.RaggedTensor.from_nested_row_splits(values, arrays[1:], validate=False)
    if isinstance(like, tf.SparseTensor):
        indices, values, shape = arrays
        return tf.SparseTensor(indices, tf.convert_to_tensor(values, like.dtype), shape)
    return arrays[0]
