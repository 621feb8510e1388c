"""The compiled functions that compute a model's outputs, and their all-gather between workers.

Each worker sends the outputs of its rows once per call. They are transferred bitwise identical for
all types: numbers of every dtype, strings, ragged and sparse tensors.
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

from tfdist.loops.data_handler import DataHandler
from tfdist.patches.sizes_on_host import with_sizes_on_host
from tfdist.replica.replica import StepOptions
from tfdist.step.step import drawn_outputs, seeds_in_predictions
from tfdist.strategies.base import Strategy
from tfdist.strategies.inner_loop import LoopResult
from tfdist.upstream import keras_training
from tfdist.upstream.keras_model import (
    ensured_global_generator,
    global_generator,
    use_global_generator,
)
from tfdist.upstream.keras_variables import values_of
from tfdist.upstream.random_states import RandomStates
from tfdist.upstream.tensorflow_graphs import current_graph, forget_gradients, kinds_of, with_state
from tfdist.upstream.tensorflow_random import draws_numbers


class LocalOutputs(NamedTuple):
    """The outputs of one worker in one call.

    Attributes:
        pieces: Structures of tensors, the same number per step, in the order of the rows.
        num_steps: Number of steps.
        counts: If one piece contains all steps, the number of rows of each output in each step.
    """

    pieces: list[Any]
    num_steps: int
    counts: np.ndarray | None = None


#: Computes the outputs for up to a number of batches of an iterator. Returns the result of the
#: loop, and the outputs in pieces, in the order of the rows.
OutputsFn = Callable[[Iterator[Any], int], tuple[LoopResult, list[Any]]]

#: The same, but only for the rows of this process.
LocalFn = Callable[[Iterator[Any], int], tuple[LoopResult, LocalOutputs]]

#: Operations whose only effect is to take a batch, or to read a weight.
_READS = {"IteratorGetNext", "ReadVariableOp", "ResourceGather"}

#: Outputs as arrays, or ragged or sparse tensors, in the order of a structure.
Leaves = list[Any]


class Outputs:
    """Traces the functions that compute outputs, on per-replica batches or in full-batch mode.

    Args:
        model: A built model that was created in the strategy's scope.
        strategy: Runs the replicas.
        options: The options of the trainer's steps.
    """

    def __init__(self, model: keras.Model, strategy: Strategy, options: StepOptions) -> None:
        self._model, self._strategy, self._options = model, strategy, options
        self._draws = False
        self._single: dict[tuple[bool, bool], Any] = {}
        self._multiple: dict[tuple[bool, bool], Any] = {}
        self._read: list[weakref.ref[tf.Variable]] = []

    @property
    def is_traced(self) -> bool:
        """Whether any function has been traced."""
        return bool(self._single)

    def function(self, data: DataHandler, full_batch: bool) -> OutputsFn:
        """Returns the function that computes the outputs for batches.

        Args:
            data: The data.
            full_batch: Whether every replica gets full batches.
        """
        self._forget_stale()
        local = self._local(data, full_batch)
        # In full-batch mode every worker computes all outputs.
        is_exchanged = self._strategy.group.size > 1 and not full_batch

        def predict(iterator: Iterator[Any], num_steps: int) -> tuple[LoopResult, list[Any]]:
            with self._strategy.variables.collective_section():
                result, outputs = local(iterator, num_steps)
                if not is_exchanged:
                    return result, outputs.pieces
                return result, outputs_of_all_workers(self._strategy, outputs)

        return predict

    def _forget_stale(self) -> None:
        """Discards functions that read variables which the model no longer has.

        Training after a prediction may shard, move or gather the variables. The functions do not
        keep them alive.
        """
        values = [value for variable in self._model.variables for value in values_of(variable)]
        pairs = itertools.zip_longest((known() for known in self._read), values)
        if any(known is not value for known, value in pairs):
            self._single.clear()
            self._multiple.clear()
            self._read = [*map(weakref.ref, values)]

    def _local(self, data: DataHandler, full_batch: bool) -> LocalFn:
        """Returns the function that computes the outputs for the rows of this process."""
        of_one: Any = functools.partial(self._next_outputs, full_batch, data.own_rows)
        is_split = self._strategy.num_replicas > 1 and not full_batch
        if self._model.run_eagerly:
            self._draws = is_split and bool(seeds_in_predictions(self._model))
            return self._batch_by_batch(of_one, data)
        key = full_batch, data.own_rows
        if key not in self._single:
            self._single[key] = tf.function(of_one, reduce_retracing=True, autograph=False)
            counts = self._strategy.group.size > 1
            many = functools.partial(_outputs_of_many, self._single[key], counts)
            self._multiple[key] = tf.function(many, reduce_retracing=True, autograph=False)
        one_by_one = self._batch_by_batch(self._single[key], data)
        compute = one_by_one
        if not (data.may_end or data.own_rows):
            compute = self._in_graph(self._single[key], self._multiple[key], one_by_one)

        def predict(iterator: Iterator[Any], num_steps: int) -> tuple[LoopResult, LocalOutputs]:
            nonlocal compute
            if is_split and not self._draws and self._draws_when_traced(key, iterator):
                compute = self._local(data, full_batch)
            return compute(iterator, num_steps)

        return predict

    def _draws_when_traced(self, key: tuple[bool, bool], iterator: Any) -> bool:
        """Returns whether the outputs contain random numbers; their function is then discarded.

        It has to be traced again, with the replicas' rows of the global batch's numbers.
        """
        state = RandomStates.current()
        kinds = kinds_of(self._single[key].get_concrete_function(iterator).graph)
        if not draws_numbers(kinds):
            return False
        state.restore()
        ensured_global_generator()  # by the threads of replicas, each would create its own
        self._draws = True
        self._single.clear()
        self._multiple.clear()
        return True

    def _in_graph(self, of_one: Any, of_many: Any, one_by_one: LocalFn) -> LocalFn:
        """Returns a function of many batches per call, if arrays can hold their outputs."""

        def predict(iterator: Iterator[Any], num_steps: int) -> tuple[LoopResult, LocalOutputs]:
            if num_steps == 1 or not _fit_in_arrays(_pieces(of_one, iterator)):
                return one_by_one(iterator, num_steps)
            rows, checksum, outputs, counts = of_many(iterator, tf.constant(num_steps))
            result = LoopResult(num_steps, int(rows), 0.0, int(checksum))
            return result, LocalOutputs([outputs], num_steps, np.asarray(counts))

        return predict

    def _batch_by_batch(self, of_one: Any, data: DataHandler) -> LocalFn:
        """Returns a function that computes batch by batch, until the data ends."""
        # After the end of its data, a worker gets batches without rows until all data ends.
        ends_without_rows = data.own_rows and self._strategy.group.size > 1

        def predict(iterator: Iterator[Any], num_steps: int) -> tuple[LoopResult, LocalOutputs]:
            num_done, num_rows, checksum_sum, outputs = 0, 0, 0, list[Any]()
            for _ in range(num_steps):
                try:
                    rows, checksum, by_replica = of_one(iterator)
                except (StopIteration, tf.errors.OutOfRangeError):
                    break
                if ends_without_rows and rows == 0:
                    break
                num_done, num_rows = num_done + 1, num_rows + int(rows)
                checksum_sum += int(checksum)
                outputs.extend(by_replica)
            return LoopResult(num_done, num_rows, 0.0, checksum_sum), LocalOutputs(
                outputs, num_done
            )

        return predict

    def _next_outputs(
        self, full_batch: bool, own_rows: bool, iterator: Any
    ) -> tuple[tf.Tensor, tf.Tensor, list[Any]]:
        """Returns rows and checksum of the next global batch, and the outputs by replica."""
        generator = global_generator()

        def on_rows(rows: Any) -> Any:
            if generator is not None:
                use_global_generator(generator)
            return self._model.predict_step(rows)

        element = self._strategy.feed.received(next(iterator), own_rows)
        on_rows = with_sizes_on_host(on_rows)
        if self._draws and not full_batch:
            outputs = drawn_outputs(self._model, self._strategy, self._options, on_rows, element)
        else:
            outputs = self._strategy.outputs(on_rows, element, full_batch)
        if (graph := current_graph()) is not None:
            forget_gradients(graph)  # a prediction takes none
        return element.num_rows, element.checksum, outputs


def _pieces(of_one: Any, iterator: Any) -> list[Any]:
    """Returns the traced outputs of the function of one batch, by replica."""
    return of_one.get_concrete_function(iterator).structured_outputs[2]


def _fit_in_arrays(pieces: list[Any]) -> bool:
    """Returns whether outputs are dense tensors that differ only in their number of rows."""
    return all(
        isinstance(output, tf.Tensor) and output.shape.rank and None not in output.shape[1:]
        for output in keras.tree.flatten(pieces)
    )


def _outputs_of_many(
    of_one: Any, counts: bool, iterator: Any, num_steps: tf.Tensor
) -> tuple[Any, Any, Any, Any]:
    """Returns rows and checksum of several batches, and their outputs, concatenated on the host.

    Args:
        of_one: The function of one batch, as `Outputs` traces it.
        counts: Whether to also return the number of rows of each output in each batch: int32, one
            row per batch. Otherwise the result has no rows.
        iterator: An iterator with at least `num_steps` batches.
        num_steps: Number of batches, int32 scalar.
    """
    traced = of_one.get_concrete_function(iterator)
    pieces = traced.structured_outputs[2]
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
    # A batch is taken after the one before. What only reads weights may then compute two batches at
    # a time. Updates of seeds and all-gathers of sharded weights keep the order of the batches.
    _, rows, checksum, arrays = tf.while_loop(
        lambda number, *_: number < num_steps,
        step,
        (0, zero, zero, arrays),
        parallel_iterations=2 if with_state(kinds_of(traced.graph)) <= _READS else 1,
    )
    with tf.device("CPU:0"):
        whole = [a.concat() for a in arrays[: len(leaves)]]
        own = arrays[-1].stack() if counts else tf.zeros([0, len(leaves)], tf.int32)
    return rows, checksum, keras.tree.pack_sequence_as(pieces[0], whole), own


def concatenated(outputs: list[Any]) -> Any:
    """Concatenates the outputs of several replicas and batches along the rows."""

    def join(*tensors: Any) -> Any:
        if len(tensors) == 1:
            return tensors[0]
        nonempty = [tensor for tensor in tensors if tensor.shape[0] != 0] or [tensors[0]]
        return keras_training.concatenated(nonempty)

    return keras.tree.map_structure(join, *outputs)


def outputs_of_all_workers(strategy: Strategy, local: LocalOutputs) -> list[Any]:
    """Returns the outputs for the global batches, in order. All workers must call it together.

    Args:
        strategy: The strategy.
        local: The outputs of this worker.
    """
    if local.counts is None:
        local = _concatenated(local)
    gathered = strategy.group.gather_objects(_arrays(local))
    if not all(gathered):
        return local.pieces  # no worker has outputs, or only some have, which the loop reports
    like = local.pieces[0]
    by_worker = [_by_step(arrays, like) for arrays in gathered]
    if len(set(map(len, by_worker))) > 1:
        return local.pieces  # as above
    in_order = [
        leaves for step in zip(*by_worker, strict=True) for group in step for leaves in group
    ]
    if _differ_by_rows(in_order):
        in_order = [[np.concatenate(column) for column in zip(*in_order, strict=True)]]
    return [_as_tensors(like, leaves) for leaves in in_order]


def _concatenated(local: LocalOutputs) -> LocalOutputs:
    """Concatenates pieces if they are arrays that differ only in their number of rows."""
    pieces = [[_as_array(leaf) for leaf in keras.tree.flatten(piece)] for piece in local.pieces]
    if not pieces or not _differ_by_rows(pieces):
        return local
    rows = np.array([[len(leaf) for leaf in leaves] for leaves in pieces])
    counts = rows.reshape(local.num_steps, -1, len(pieces[0])).sum(1)
    whole = [np.concatenate(column) for column in zip(*pieces, strict=True)]
    return LocalOutputs(
        [keras.tree.pack_sequence_as(local.pieces[0], whole)], local.num_steps, counts
    )


def _arrays(local: LocalOutputs) -> list[np.ndarray]:
    """Returns the arrays to send: `counts` or else the number of steps, and the pieces."""
    if not local.pieces:
        return []
    head = np.array(local.num_steps) if local.counts is None else local.counts
    leaves = keras.tree.flatten(local.pieces)
    return [head.astype(np.int64), *(array for leaf in leaves for array in _components(leaf))]


def _by_step(arrays: list[np.ndarray], like: Any) -> list[list[Leaves]]:
    """Returns the pieces of each step from the arrays that a worker sent."""
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
    """Returns whether all outputs are arrays whose shapes differ only in the number of rows."""
    return all(
        all(isinstance(one, np.ndarray) and one.ndim for one in column)
        and len({one.shape[1:] for one in column}) == 1
        for column in zip(*pieces, strict=True)
    )


def _as_array(leaf: Any) -> Any:
    return leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf


def _as_tensors(like: Any, leaves: Leaves) -> Any:
    """Returns a structure of tensors with the dtypes of another."""
    tensors = [
        tf.convert_to_tensor(leaf, one.dtype) if isinstance(leaf, np.ndarray) else leaf
        for leaf, one in zip(leaves, keras.tree.flatten(like), strict=True)
    ]
    return keras.tree.pack_sequence_as(like, tensors)


def _components(leaf: Any) -> list[np.ndarray]:
    """Returns the arrays that an output consists of."""
    parts = [leaf]
    if isinstance(leaf, tf.RaggedTensor):
        parts = [leaf.flat_values, *leaf.nested_row_splits]
    elif isinstance(leaf, tf.SparseTensor):
        parts = [leaf.indices, leaf.values, leaf.dense_shape]
    return [np.asarray(_as_array(part)) for part in parts]


def _size(like: Any) -> int:
    """Returns the number of arrays that an output consists of."""
    if isinstance(like, tf.RaggedTensor):
        return 1 + like.ragged_rank
    return 3 if isinstance(like, tf.SparseTensor) else 1


def _put_together(like: Any, components: Iterator[np.ndarray]) -> Any:
    """Returns an output of the same type as another from the arrays that it consists of."""
    arrays = [next(components) for _ in range(_size(like))]
    if isinstance(like, tf.RaggedTensor):
        values = tf.convert_to_tensor(arrays[0], like.dtype)
        return tf.RaggedTensor.from_nested_row_splits(values, arrays[1:], validate=False)
    if isinstance(like, tf.SparseTensor):
        indices, values, shape = arrays
        return tf.SparseTensor(indices, tf.convert_to_tensor(values, like.dtype), shape)
    return arrays[0]
