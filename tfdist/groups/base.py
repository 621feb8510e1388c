"""The interface of a process group, and the group of a single process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import numpy as np
import tensorflow as tf

from tfdist.groups.fusion import copied_slice

#: Chunk size for exchanges of large values, which are in memory several times meanwhile.
_CHUNK_BYTES = 16 << 20


class ProcessGroup(ABC):
    """The processes that train one model together, each running the whole script.

    Operations on tensors may be called in graphs and eagerly, once per process and in the same
    order in all processes. All other operations are called outside of graphs.

    A subclass implements the abstract methods and may override `reduce_scatter`.

    Attributes:
        name: Name of the group in tables.
        size: Number of processes.
        rank: Index of this process.
        local_rank: Index of this process among the processes of its host.
        sums_in_order: Whether buckets must be exchanged sequentially, because the transport fuses
            buckets that are ready at the same time. Rounding of sums over three or more processes
            depends on the fusion, so runs would not be bitwise identical.
        gathers_in_order: Whether all-gathers and sums run in the order in which they were traced.
        shuts_down_at_exit: Whether collectives in other processes fail when rank 0 exits.
    """

    name: str
    size: int
    rank: int
    local_rank: int
    sums_in_order = False
    gathers_in_order = False
    shuts_down_at_exit = False

    def __init__(self) -> None:
        self._before_exchange: list[Callable[[], None]] = []

    # ---- tensors ----

    @abstractmethod
    def all_reduce(self, tensors: list) -> list:
        """Returns the sums of tensors over the processes.

        Args:
            tensors: Dense tensors with the same shapes in all processes, or `tf.IndexedSlices`,
                whose slices are concatenated.
        """

    @abstractmethod
    def all_gather(self, vector: tf.Tensor, sizes: Sequence[int], name: str) -> tf.Tensor:
        """Returns the vectors of all processes, concatenated in the order of the ranks.

        Args:
            vector: The vector of this process.
            sizes: The number of elements of each process's vector.
            name: A name that is unique among concurrent collectives, and the same in all processes.
        """

    def reduce_scatter(self, vectors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums vectors over the processes; returns this process's shards (see `shard_sizes`)."""
        shards = []
        for vector, total in zip(vectors, self.all_reduce(vectors), strict=True):
            sizes = shard_sizes(vector.shape.num_elements(), self.size)
            begin = sum(sizes[: self.rank])
            shards.append(copied_slice(total, 0, begin, begin + sizes[self.rank]))
        return shards

    @abstractmethod
    def broadcast_tensor(self, tensor: tf.Tensor, root: int = 0) -> tf.Tensor:
        """Returns the tensor of rank `root`. Called eagerly, with the same shape on all ranks."""

    # ---- values on the host ----

    @abstractmethod
    def gather_words(self, words: np.ndarray) -> np.ndarray:
        """Returns the int64 vectors of all processes, as rows: shape `(size, len(words))`.

        Each of n processes receives n rows, as in all other gather functions of this class.
        """

    def gather(self, numbers: Sequence[float]) -> np.ndarray:
        """Returns the numbers of all processes, as rows: shape `(size, len(numbers))`, float64.

        The cost is O(size) per process.
        """
        local = np.asarray(numbers, np.float64)
        self._begin_exchange()
        return self.gather_words(local.view(np.int64)).view(np.float64)

    def gather_bytes(self, local: np.ndarray) -> list[np.ndarray]:
        """Returns the bytes of all processes, by rank.

        Each of n processes receives n times the bytes of the longest vector, in pieces.

        Args:
            local: A uint8 vector, whose length may differ from process to process.
        """
        sizes = self.gather([local.size])[:, 0].astype(int)
        gathered = [np.empty(size, np.uint8) for size in sizes]
        for begin in range(0, int(sizes.max()), _CHUNK_BYTES):
            end = min(begin + _CHUNK_BYTES, int(sizes.max()))
            piece = np.zeros(-(-(end - begin) // 8) * 8, np.uint8)
            mine = local[begin:end]
            piece[: mine.size] = mine
            for whole, row in zip(gathered, self.gather_words(piece.view(np.int64)), strict=True):
                part = whole[begin:end]
                part[:] = row.view(np.uint8)[: part.size]
        return gathered

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns the Python objects of all processes, by rank.

        Each of n processes receives n times the bytes of the largest one.
        """
        local = np.frombuffer(cloudpickle.dumps(value), np.uint8)
        return [cloudpickle.loads(data) for data in self.gather_bytes(local)]

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Returns the bytes of rank 0.

        Each process receives the bytes once, and one number from each process.
        """
        size = int(self.gather([len(data)])[0, 0])
        if not size:
            return b""
        words = np.zeros(-(-size // 8) * 8, np.uint8)
        if self.rank == 0:
            words[:size] = np.frombuffer(data, np.uint8)
        received = self.broadcast_tensor(tf.constant(words.view(np.int64)))
        return received.numpy().view(np.uint8)[:size].tobytes()

    def broadcast_object(self, value: Any) -> Any:
        """Returns the Python object of rank 0. Objects of other ranks are ignored.

        Each process receives its bytes once, and one number from each process.
        """
        data = cloudpickle.dumps(value) if self.rank == 0 else b""
        return cloudpickle.loads(self.broadcast_bytes(data))

    def sum_arrays(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the sums of floating-point arrays over the processes, with one all-reduce."""
        if self.size == 1:
            return list(arrays)
        self._begin_exchange()
        sums = tf.function(self.all_reduce, autograph=False)
        return [total.numpy() for total in sums([tf.convert_to_tensor(a) for a in arrays])]

    def barrier(self) -> None:
        """Waits until all processes have called it. Each receives one number from each process."""
        self.gather([0.0])

    def before_exchange(self, callback: Callable[[], None]) -> None:
        """Registers a function to call before each exchange of values on the host."""
        self._before_exchange.append(callback)

    def _begin_exchange(self) -> None:
        for callback in self._before_exchange:
            callback()

    # ---- information ----

    @property
    def is_chief(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def describe(self) -> dict[str, str]:
        """Returns rows for the start-up table."""
        return {}

    def silent(self) -> list[int]:
        """Returns the ranks that are known not to respond."""
        return []


class LocalGroup(ProcessGroup):
    """The group of a single process: each collective returns its input."""

    name, size, rank, local_rank = "local", 1, 0, 0

    def all_reduce(self, tensors: list) -> list:
        return tensors

    def all_gather(self, vector: tf.Tensor, sizes: Sequence[int], name: str) -> tf.Tensor:
        return vector

    def reduce_scatter(self, vectors: list[tf.Tensor]) -> list[tf.Tensor]:
        return vectors

    def broadcast_tensor(self, tensor: tf.Tensor, root: int = 0) -> tf.Tensor:
        return tensor

    def gather_words(self, words: np.ndarray) -> np.ndarray:
        return words[np.newaxis]


def shard_sizes(num_elements: int, num_owners: int) -> list[int]:
    """Returns the number of elements of each shard. The first shards may have one more element."""
    quotient, remainder = divmod(num_elements, num_owners)
    return [quotient + (owner < remainder) for owner in range(num_owners)]
