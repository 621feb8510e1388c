"""Which shards of a model a rank reads from a checkpoint, and in which files they are."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tfdist.groups.base import shard_sizes


class ShardRange(NamedTuple):
    """Elements `begin` to `end` of a flattened variable.

    Attributes:
        shape: The shape of the variable.
        begin: The first element.
        end: The element after the last one.
    """

    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class OwnShards:
    """The shards of one rank.

    Attributes:
        shards: The elements that it has, by the name of the variable.
        has_copies: Whether it also has full copies of other sharded variables.
    """

    shards: Mapping[str, ShardRange]
    has_copies: bool

    def needed(self, listed: Collection[str]) -> set[str]:
        """Returns the files of a checkpoint that have elements of these shards.

        Args:
            listed: The files of the checkpoint. A rank that has written shards has written the
                elements that `shard_sizes` gives it, whatever the number of ranks was.
        """
        data, needed = _data_files(listed), _files_without_shards(listed)
        for shape, begin, end in self.shards.values():
            first = 0
            for name, size in zip(data, shard_sizes(math.prod(shape), len(data)), strict=True):
                if begin < first + size and first < end:
                    needed.add(name)
                first += size
        return needed

    def needed_for_others(self, listed: Collection[str]) -> set[str]:
        """Returns the files that have variables without shards, and sharded ones with copies."""
        needs_all = self.has_copies or not self.shards
        return {*listed} if needs_all else _files_without_shards(listed)


def _data_files(listed: Collection[str]) -> list[str]:
    """Returns the files with the elements of variables, in the order of the ranks."""
    return sorted(name for name in listed if ".data-" in name)


def _files_without_shards(listed: Collection[str]) -> set[str]:
    """Returns all files but those that have nothing but shards of the ranks after the first."""
    return {*listed} - {*_data_files(listed)[1:]}


#: Reads all variables whole.
NO_SHARDS = OwnShards({}, has_copies=False)
