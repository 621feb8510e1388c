"""Blocks of Ray Data datasets, and how an actor sends their rows to its worker's process."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple


class Blocks(NamedTuple):
    """An executed dataset, in Ray's object store.

    Attributes:
        refs: References to Arrow tables.
        sizes: Number of rows of each.
    """

    refs: tuple[Any, ...]
    sizes: tuple[int, ...]

    def slices(self, start: int, stop: int) -> Iterator[tuple[Any, int, int]]:
        """Yields each block with rows from `start` to `stop`, and the range of these rows in it."""
        ends = itertools.accumulate(self.sizes)
        for ref, size, end in zip(self.refs, self.sizes, ends, strict=True):
            first, last = max(start - end + size, 0), min(stop - end + size, size)
            if first < last:
                yield ref, first, last

    def rows(self, start: int, stop: int, num_rows: int) -> Iterator[dict[str, Any]]:
        """Yields arrays of at most `num_rows` rows, by column."""
        import ray
        from ray.data.block import BlockAccessor

        for ref, first, last in self.slices(start, stop):
            table = ray.get(ref)
            for begin in range(first, last, num_rows):
                rows = table.slice(begin, min(num_rows, last - begin))
                yield BlockAccessor.for_block(rows).to_numpy()


def execute(datasets: Mapping[str, Any]) -> dict[str, Blocks]:
    """Executes Ray datasets, by name, and returns their blocks."""
    import ray

    size_of = ray.remote(num_cpus=0)(lambda table: table.num_rows)
    refs = {name: dataset.to_arrow_refs() for name, dataset in datasets.items()}
    sizes = {name: ray.get([size_of.remote(ref) for ref in refs[name]]) for name in refs}
    return {name: Blocks(tuple(refs[name]), tuple(sizes[name])) for name in refs}


def send_rows(connection: Connection, datasets: Mapping[str, Blocks]) -> None:
    """Receives a request, and sends the dataset's number of rows, the rows, and an empty dict.

    If the rows cannot be read, it sends a string with the reason.
    """
    with connection, contextlib.suppress(OSError, EOFError):  # the worker closed the connection
        name, start, stop, num_rows = connection.recv()
        if name not in datasets:
            names = ", ".join(sorted(datasets)) or "none"
            connection.send(f"tfdist.ray.train has no dataset {name!r}. Its datasets: {names}.")
            return
        connection.send(sum(datasets[name].sizes))
        try:
            for rows in datasets[name].rows(start, stop, num_rows):
                connection.send(rows)
        except Exception as error:  # Ray raises errors of many types, such as for a lost node
            if isinstance(error, OSError):
                raise
            connection.send(f"Rows of the Ray dataset {name!r} cannot be read: {error}")
        connection.send({})
