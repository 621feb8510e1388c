"""The compiled functions that compute a model's outputs."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.loops import outputs_of_workers
from tfdist.loops.feed import Feed
from tfdist.strategies.base import Strategy
from tfdist.strategies.inner_loop import Made
from tfdist.upstream.keras_model import global_generator, use_global_generator
from tfdist.upstream.keras_variables import values_of

#: Computes the outputs for up to that many batches of an iterator: what was done, and the outputs
#: in pieces that laid end to end are in the order of the rows.
OutputsFn = Callable[[Iterator[Any], int], tuple[Made, list[Any]]]

#: The same for the shares of this process alone: what was done, and its outputs, step by step.
OwnFn = Callable[[Iterator[Any], int], tuple[Made, outputs_of_workers.Own]]


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

    def function(self, feed: Feed, whole: bool) -> OutputsFn:
        """Returns the function that computes the outputs for some batches.

        Args:
            feed: Of the batches.
            whole: Whether every replica is given whole batches.
        """
        self._forget_what_reads_others()
        own = self._own(feed, whole)
        # Of whole batches every worker has all outputs by itself.
        crosses = self._strategy.stops_together and not whole

        def predict(iterator: Iterator[Any], num_steps: int) -> tuple[Made, list[Any]]:
            with self._strategy.together():
                made, outputs = own(iterator, num_steps)
                if not crosses:
                    return made, outputs.pieces
                return made, outputs_of_workers.of_all(self._strategy, outputs)

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

    def _own(self, feed: Feed, whole: bool) -> OwnFn:
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

        def predict(iterator: Iterator[Any], num_steps: int) -> tuple[Made, outputs_of_workers.Own]:
            if num_steps == 1 or not _fit_in_arrays(_pieces(of_one, iterator)):
                return one_by_one(iterator, num_steps)
            rows, checksum, outputs, counts = of_many(iterator, tf.constant(num_steps))
            made = Made(num_steps, int(rows), 0.0, int(checksum))
            return made, outputs_of_workers.Own([outputs], num_steps, np.asarray(counts))

        return predict

    def _one_by_one(self, of_one: Any, feed: Feed) -> OwnFn:
        """Returns what takes a batch a call, until the data end."""
        # Batches without rows follow, which nobody may leave while others have some.
        ends_without_rows = feed.own_rows and self._strategy.stops_together

        def predict(iterator: Iterator[Any], num_steps: int) -> tuple[Made, outputs_of_workers.Own]:
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
            return Made(num_made, num_rows, 0.0, mixture), outputs_of_workers.Own(outputs, num_made)

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
