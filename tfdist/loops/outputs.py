"""The compiled functions that compute a model's outputs, and their all-gather between workers.

Each worker sends the outputs of its rows once per call. They are transferred bitwise identical for
all types: numbers of every dtype, strings, ragged and sparse tensors.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.loops.data_handler import DataHandler
from tfdist.patches.keras_patches import patched_for_outputs
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
from tfdist.upstream.tensorflow_graphs import current_graph, forget_gradients, kinds_of, with_state
from tfdist.upstream.tensorflow_random import RandomStates, draws_at_trace_warned, draws_numbers


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


class Outputs:
    """Traces the functions that compute outputs, on per-replica batches or in full-batch mode."""

    def __init__(self, model: keras.Model, strategy: Strategy, options: StepOptions) -> None:
        self._model, self._strategy, self._options = model, strategy, options
        self._draws = False
        self._single: dict[tuple[bool, bool], Any] = {}
        self._multiple: dict[tuple[bool, bool], Any] = {}
        self._read: list[weakref.ref[tf.Variable]] = []
        # The kinds of functions and batches whose outputs contain no random numbers.
        self._without_draws = set[Any]()

    @property
    def is_traced(self) -> bool:
        """Whether any function has been traced."""
        return bool(self._single)

    def function(self, data: DataHandler, full_batch: bool) -> OutputsFn:
        """Returns the function that computes the outputs for batches."""
        # Training after a prediction may shard, move or gather the variables that functions read.
        values = [value for variable in self._model.variables for value in values_of(variable)]
        pairs = itertools.zip_longest((value_read() for value_read in self._read), values)
        if any(value_read is not value for value_read, value in pairs):
            self._single.clear()
            self._multiple.clear()
            self._without_draws.clear()
            self._read = [*map(weakref.ref, values)]
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

        kind = key, *tf.nest.flatten(data.element_spec)

        def predict(iterator: Iterator[Any], num_steps: int) -> tuple[LoopResult, LocalOutputs]:
            nonlocal compute
            if is_split and not self._draws and kind not in self._without_draws:
                if self._draws_when_traced(key, iterator):
                    compute = self._local(data, full_batch)
                else:
                    self._without_draws.add(kind)
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
            # Arrays hold dense outputs that differ only in their number of rows.
            if num_steps == 1 or not all(
                isinstance(output, tf.Tensor) and output.shape.rank and None not in output.shape[1:]
                for output in keras.tree.flatten(
                    of_one.get_concrete_function(iterator).structured_outputs[2]
                )
            ):
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
            warned = nullcontext() if self._model.run_eagerly else draws_at_trace_warned()
            with warned, patched_for_outputs():
                outputs = self._strategy.outputs(on_rows, element, full_batch)
        if (graph := current_graph()) is not None:
            forget_gradients(graph)  # a prediction takes none
        return element.num_rows, element.checksum, outputs


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
                num_rows = tf.stack([sum(tf.shape(piece)[0] for piece in leaf) for leaf in by_leaf])
                arrays[-1] = arrays[-1].write(number, num_rows)
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
        counted = arrays[-1].stack() if counts else tf.zeros([0, len(leaves)], tf.int32)
    return rows, checksum, keras.tree.pack_sequence_as(pieces[0], whole), counted


def concatenated(outputs: list[Any]) -> Any:
    """Concatenates the outputs of several replicas and batches along the rows."""

    def join(*tensors: Any) -> Any:
        nonempty = [tensor for tensor in tensors if 0 not in tensor.shape[:1]] or [tensors[0]]
        if _differ_by_rows(nonempty):
            return tf.concat(nonempty, 0)  # Keras's function takes ten times as long to find out
        return keras_training.concatenated(nonempty)

    return keras.tree.map_structure(join, *outputs)


def outputs_of_all_workers(strategy: Strategy, local: LocalOutputs) -> list[Any]:
    """Returns the outputs for the global batches, in order. All workers must call it together."""
    sent = [[_sent(leaf) for leaf in keras.tree.flatten(piece)] for piece in local.pieces]
    gathered = strategy.group.gather_objects((local.num_steps, local.counts, sent))
    if not all(pieces for *_, pieces in gathered):
        return local.pieces  # no worker has outputs, or only some have, which the loop reports
    by_worker = [_by_step(*of_worker) for of_worker in gathered]
    if len(set(map(len, by_worker))) > 1:
        return local.pieces  # as above
    in_order = [piece for step in zip(*by_worker, strict=True) for part in step for piece in part]
    columns = list(zip(*in_order, strict=True))
    if all(_differ_by_rows(column) for column in columns):
        in_order = [[np.concatenate(column) for column in columns]]
    like = local.pieces[0]
    dtypes = [leaf.dtype for leaf in keras.tree.flatten(like)]
    return [keras.tree.pack_sequence_as(like, list(map(_received, p, dtypes))) for p in in_order]


def _by_step(num_steps: int, counts: np.ndarray | None, pieces: list[list]) -> list[list[list]]:
    """Returns the pieces of each step; arguments as of `LocalOutputs`."""
    if counts is None:
        a_step = len(pieces) // num_steps
        return [pieces[i : i + a_step] for i in range(0, len(pieces), a_step)]
    ends = np.cumsum(counts, 0)[:-1]
    parts = [np.split(leaf, ends[:, i]) for i, leaf in enumerate(pieces[0])]
    return [[list(step)] for step in zip(*parts, strict=True)]


def _differ_by_rows(column: Sequence[Any]) -> bool:
    """Returns whether outputs are arrays whose shapes differ only in the number of rows."""
    are_arrays = all(isinstance(one, (np.ndarray, tf.Tensor)) and one.ndim for one in column)
    return are_arrays and len({tuple(one.shape[1:]) for one in column}) == 1


def _sent(leaf: Any) -> Any:
    """Returns an output as an array; of a ragged or sparse one, a tuple of its parts."""
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.flat_values.numpy(), [splits.numpy() for splits in leaf.nested_row_splits]
    if isinstance(leaf, tf.SparseTensor):
        return leaf.indices.numpy(), leaf.values.numpy(), leaf.dense_shape.numpy()
    return leaf.numpy() if isinstance(leaf, tf.Tensor) else np.asarray(leaf)


def _received(leaf: Any, dtype: Any) -> Any:
    """Returns an output from what `_sent` returned."""
    match leaf:
        case values, splits:
            values = tf.convert_to_tensor(values, dtype)
            return tf.RaggedTensor.from_nested_row_splits(values, splits, validate=False)
        case indices, values, shape:
            return tf.SparseTensor(indices, tf.convert_to_tensor(values, dtype), shape)
    return tf.convert_to_tensor(leaf, dtype)
