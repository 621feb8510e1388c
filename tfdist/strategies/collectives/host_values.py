"""What the workers of a run settle among themselves, by sums over the replicas.

Everything small goes through a strategy's `all_reduce`, so that it holds for every way of crossing
processes: what one worker says is a sum to which the others add zeros.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import ConfigurationError
from tfdist.upstream.tensorflow import seed_of_process

#: That cross at once of what may be large, and are held several times over on their way.
_PIECE_BYTES = 16 << 20


class Workers(Protocol):
    """A strategy of several workers, as far as this folder needs one."""

    @property
    def devices(self) -> Sequence[str]:
        """Names of the devices of this process."""

    @property
    def num_workers(self) -> int:
        """Processes that train together."""

    @property
    def rank(self) -> int:
        """This process among them."""

    def __hash__(self) -> int:
        """By identity: what is compiled for it is kept."""

    def run(self, fn: Callable[[int], Any]) -> Any:
        """Calls `fn(index)` on every replica of this process."""

    def local_results(self, results: Any) -> list[Any]:
        """Returns what `run` returned as a list."""

    def update(self, fn: Callable[[Any], Any], results: Any) -> list[Any]:
        """Calls `fn(result)` once for each copy of the variables."""

    def all_reduce(self, tensors: list, op: str = "SUM") -> list:
        """Returns tensors reduced over all replicas; called on a replica."""

    def gather(self, numbers: Sequence[float]) -> np.ndarray:
        """Returns one row of numbers from each worker, in each of them."""


def check_as_many(workers: Workers, number: int, what: str, option: str) -> None:
    """Checks that all workers have as many of something.

    Args:
        workers: Several.
        number: That this one has.
        what: They are.
        option: Which says how many.

    Raises:
        ConfigurationError: They have not.
    """
    counts = workers.gather([number])[:, 0].astype(int)
    if counts.min() < counts.max():
        raise ConfigurationError(
            f"The workers have {', '.join(map(str, counts))} {what}, by rank: "
            f"expected as many on each; name them with {option}."
        )


def synchronize_seed(workers: Workers) -> None:
    """Gives all workers one seed, unless the user of one has set it.

    Shuffles and initial weights are to be the same everywhere.
    """
    # Not of the generator that draws the initial weights: they are those of one worker.
    seed = random.SystemRandom().randrange(2**31)
    told = workers.gather([seed_of_process() is not None, seed])
    if not told[:, 0].any():
        keras.utils.set_random_seed(int(told[0, 1]))


def gather(workers: Workers, mine: np.ndarray) -> np.ndarray:
    """Returns one row of numbers from each worker, in each of them.

    Args:
        workers: Several.
        mine: This worker's row, shape `(1, n)`, float64; `n` the same on every worker.
    """
    place = np.zeros((workers.num_workers, 1))
    place[workers.rank] = 1.0
    return np.asarray(_adder(workers)(tf.constant(place * mine)))


def gather_bytes(
    workers: Workers, gather_words: Callable[[np.ndarray], np.ndarray], mine: np.ndarray
) -> list[np.ndarray]:
    """Returns the bytes of each worker, in each of them, which may have more or fewer.

    Args:
        workers: Several.
        gather_words: Returns as many int64 from each of them, a row each.
        mine: uint8, of one dim.
    """
    sizes = workers.gather([mine.size])[:, 0].astype(int)
    gathered = [np.empty(size, np.uint8) for size in sizes]
    for begin in range(0, int(sizes.max()), _PIECE_BYTES):
        end = min(begin + _PIECE_BYTES, int(sizes.max()))
        piece = np.zeros(-(-(end - begin) // 8) * 8, np.uint8)
        own = mine[begin:end]
        piece[: own.size] = own
        table = gather_words(piece.view(np.int64))
        for whole, row in zip(gathered, table, strict=True):
            part = whole[begin:end]
            part[:] = row.view(np.uint8)[: part.size]
    return gathered


def broadcast_text(workers: Workers, text: str) -> str:
    """Returns the text of rank 0, in each worker; called outside of any graph."""
    data = text.encode()
    size = int(workers.gather([len(data)])[0, 0])
    row = np.zeros(size)
    if workers.rank == 0:
        row[:] = list(data)
    return bytes(workers.gather(row.tolist())[0].astype(np.uint8)).decode()


def broadcast_arrays(workers: Workers, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays of rank 0, in each worker; called outside of any graph.

    Args:
        workers: Several.
        arrays: Of numbers, by name; on other ranks than 0 they are not looked at.
    """
    specs = [[n, tf.as_dtype(a.dtype).name, list(a.shape)] for n, a in arrays.items()]
    specs = json.loads(broadcast_text(workers, json.dumps(specs)))
    with tf.device("CPU:0"):
        carried = {
            name: tf.Variable(arrays[name] if workers.rank == 0 else tf.zeros(shape, dtype))
            for name, dtype, shape in specs
        }
    broadcast(workers, list(carried.values()))
    return {name: np.asarray(variable) for name, variable in carried.items()}


def add_up(workers: Workers, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Sums arrays of floats over the workers, of the same shapes; outside of any graph."""

    def sums(mine: list[tf.Tensor]) -> list[tf.Tensor]:
        results = workers.run(
            lambda i: workers.all_reduce([t if i == 0 else tf.zeros_like(t) for t in mine])
        )
        return workers.local_results(results)[0]

    tensors = [tf.convert_to_tensor(array) for array in arrays]
    return [t.numpy() for t in tf.function(sums, autograph=False)(tensors)]


@functools.cache
def _adder(workers: Workers) -> Callable[[tf.Tensor], tf.Tensor]:
    """Sums what the first replica of each worker brings; compiled once a strategy."""

    def add(table: tf.Tensor) -> tf.Tensor:
        results = workers.run(
            lambda i: workers.all_reduce([table if i == 0 else tf.zeros_like(table)])
        )
        return workers.local_results(results)[0][0]

    return tf.function(add, reduce_retracing=True, autograph=False)


def total(workers: Workers, rows: tf.Tensor) -> tf.Tensor:
    """Sums a number over the workers, in a graph."""
    results = workers.run(lambda i: workers.all_reduce([rows if i == 0 else tf.zeros_like(rows)]))
    return workers.local_results(results)[0][0]


def broadcast(workers: Workers, variables: Sequence[tf.Variable], root: int = 0) -> None:
    """Gives variables the values that they have on the rank `root`."""
    movable = [v for v in variables if v.dtype != tf.string]

    # An argument: a rank that knew its values to be zeros would have constants, and TensorFlow
    # computes a sum of constants ahead of time, some more than once, where the others wait.
    def everywhere(is_root: tf.Tensor) -> None:
        def on_replica(i: int) -> list[tf.Tensor]:
            counts = is_root if i == 0 else tf.zeros_like(is_root)
            values = [_movable(tf.convert_to_tensor(v)) for v in movable]
            return workers.all_reduce([tf.where(counts, v, tf.zeros_like(v)) for v in values])

        def on_copy(values: list[tf.Tensor]) -> tf.Tensor:
            for variable, value in zip(movable, values, strict=True):
                variable.assign(tf.cast(value, variable.dtype))
            return tf.constant(0)

        workers.update(on_copy, workers.run(on_replica))

    tf.function(everywhere, autograph=False)(tf.constant(workers.rank == root))


def _movable(tensor: tf.Tensor) -> tf.Tensor:
    """The value in a dtype that every way of summing has, and that holds it to the bit."""
    if tensor.dtype.is_floating:
        return tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor
    return tf.cast(tensor, tf.int64)
