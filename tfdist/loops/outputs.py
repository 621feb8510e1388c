"""The compiled functions that compute a model's outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.loops.feed import Feed
from tfdist.strategies.base import Strategy
from tfdist.strategies.inner_loop import Made
from tfdist.upstream.keras_model import global_generator, use_global_generator

#: Computes the outputs for up to that many batches of an iterator: what was done, and the outputs
#: in pieces that laid end to end are in the order of the rows.
OutputsFn = Callable[[Iterator[Any], int], tuple[Made, list[Any]]]


class Outputs:
    """Traces what computes outputs, once for shares and once for whole batches.

    Args:
        model: Built, in the strategy's scope.
        strategy: Of its replicas.
    """

    def __init__(self, model: keras.Model, strategy: Strategy) -> None:
        self._model, self._strategy = model, strategy
        self._of_one: dict[bool, Any] = {}
        self._of_many: dict[bool, Any] = {}

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
        of_one: Any = functools.partial(self._of_next, whole)
        if self._model.run_eagerly:
            return self._one_by_one(of_one, feed)
        if whole not in self._of_one:
            self._of_one[whole] = tf.function(of_one, reduce_retracing=True, autograph=False)
            many = functools.partial(_end_to_end, self._of_one[whole])
            self._of_many[whole] = tf.function(many, reduce_retracing=True, autograph=False)
        one_by_one = self._one_by_one(self._of_one[whole], feed)
        if feed.may_end or feed.own_rows:
            return one_by_one
        return self._in_graph(self._of_one[whole], self._of_many[whole], one_by_one)

    def _in_graph(self, of_one: Any, of_many: Any, one_by_one: OutputsFn) -> OutputsFn:
        """Returns what takes many batches in one call, where an array can hold their outputs."""

        def predict(iterator: Iterator[Any], num_steps: int) -> tuple[Made, list[Any]]:
            with self._strategy.together():
                if num_steps > 1 and _fit_in_arrays(_pieces(of_one, iterator)):
                    rows, checksum, outputs = of_many(iterator, tf.constant(num_steps))
                    return Made(num_steps, int(rows), 0.0, int(checksum)), [outputs]
            return one_by_one(iterator, num_steps)

        return predict

    def _one_by_one(self, of_one: Any, feed: Feed) -> OutputsFn:
        """Returns what takes a batch a call, until the data end."""
        # Batches without rows follow, which nobody may leave while others have some.
        ends_without_rows = feed.own_rows and self._strategy.stops_together

        def predict(iterator: Iterator[Any], num_steps: int) -> tuple[Made, list[Any]]:
            num_made, num_rows, mixture, outputs = 0, 0, 0, list[Any]()
            for _ in range(num_steps):
                try:
                    with self._strategy.together():
                        rows, checksum, by_replica = of_one(iterator)
                except (StopIteration, tf.errors.OutOfRangeError):
                    break
                if ends_without_rows and keras.tree.flatten(by_replica)[0].shape[0] == 0:
                    break
                num_made, num_rows = num_made + 1, num_rows + int(rows)
                mixture += int(checksum)
                outputs.extend(by_replica)
            return Made(num_made, num_rows, 0.0, mixture), outputs

        return predict

    def _of_next(self, whole: bool, iterator: Any) -> tuple[tf.Tensor, tf.Tensor, list[Any]]:
        """The rows and the checksum of the next global batch, and the outputs for it."""
        generator = global_generator()

        def on_rows(rows: Any) -> Any:
            if generator is not None:
                use_global_generator(generator)
            return self._model.predict_step(rows)

        element = self._strategy.unpack(next(iterator))
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


def _end_to_end(of_one: Any, iterator: Any, num_steps: tf.Tensor) -> tuple[Any, Any, Any]:
    """The rows and checksum of some batches, and their outputs laid end to end in host memory.

    Args:
        of_one: The function of one batch, as `Outputs` traces it.
        iterator: Has as many batches.
        num_steps: Of how many; int32 scalar.
    """
    pieces = _pieces(of_one, iterator)
    size = num_steps * len(pieces)

    def step(number: tf.Tensor, rows: tf.Tensor, checksum: tf.Tensor, arrays: list) -> tuple:
        own_rows, own_checksum, outputs = of_one(iterator)
        with tf.device("CPU:0"):
            for i, piece in enumerate(outputs):
                leaves = keras.tree.flatten(piece)
                at = number * len(pieces) + i
                arrays = [a.write(at, leaf) for a, leaf in zip(arrays, leaves, strict=True)]
        rows += tf.cast(own_rows, tf.int64)
        return number + 1, rows, checksum + own_checksum, arrays

    with tf.device("CPU:0"):
        arrays = [
            tf.TensorArray(one.dtype, size, infer_shape=False, element_shape=one.shape)
            for one in keras.tree.flatten(pieces[0])
        ]
    zero = tf.constant(0, tf.int64)
    # Not two at a time: workers exchange outputs in the order of the batches.
    _, rows, checksum, arrays = tf.while_loop(
        lambda number, *_: number < num_steps, step, (0, zero, zero, arrays), parallel_iterations=1
    )
    return rows, checksum, keras.tree.pack_sequence_as(pieces[0], [a.concat() for a in arrays])
