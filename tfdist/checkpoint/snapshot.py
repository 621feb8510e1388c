"""The state of a run at one step, how it is written to files, and which parts a rank reads.

Structured state is JSON. Every array in it is stored with the variables in a TensorFlow checkpoint
(`SaveV2`), which `tf.train.load_checkpoint` reads.
"""

from __future__ import annotations

import json
import math
import posixpath
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.checkpoint import manifest
from tfdist.checkpoint.manifest import DamagedError
from tfdist.groups.base import shard_sizes

#: Names of the files.
VARIABLES, STATE = "variables", "state.json"

_ARRAY = "array:"  # in JSON, stands for the array of the name that follows


class Shard(NamedTuple):
    """The elements of a variable that one rank has.

    Attributes:
        name: The name of the variable.
        shape: The shape of the variable.
        begin: The position of the first element in the flattened variable.
        values: The elements, a vector.
    """

    name: str
    shape: tuple[int, ...]
    begin: int
    values: tf.Tensor

    @property
    def dtype(self) -> tf.DType:
        """The dtype of the variable."""
        return self.values.dtype

    def slices(self) -> Iterator[tuple[str, tf.Tensor]]:
        """Yields the specification of each slice, for `SaveV2`, and its elements."""
        position = 0
        for spec, sizes in slice_specs(self.shape, self.begin, self.begin + len(self.values)):
            num = math.prod(sizes)
            yield spec, tf.reshape(self.values[position : position + num], sizes)
            position += num


class Packed(NamedTuple):
    """A serialized, immutable snapshot, to pass between threads and processes or write to disk.

    Attributes:
        text: JSON.
        arrays: Arrays or tensors on the host, by name.
        shards: This rank's shards of other variables, if each rank writes its own.
    """

    text: str
    arrays: dict[str, Any]
    shards: Sequence[Shard] = ()

    def write(self, folder: str) -> list[str]:
        """Writes the files and returns their names; equal states give identical files."""
        self.write_variables(posixpath.join(folder, VARIABLES))
        with tf.io.gfile.GFile(posixpath.join(folder, STATE), "w") as file:
            file.write(self.text + "\n")
        return sorted(tf.io.gfile.listdir(folder))

    def write_variables(self, prefix: str) -> None:
        """Writes a TensorFlow checkpoint of the arrays and shards."""
        with tf.device("CPU:0"):
            entries = [
                (name, "", tf.convert_to_tensor(self.arrays[name])) for name in sorted(self.arrays)
            ]
            entries += [(shard.name, *piece) for shard in self.shards for piece in shard.slices()]
            names, specs, tensors = zip(*entries, strict=True)
            tf.raw_ops.SaveV2(
                prefix=prefix, tensor_names=names, shape_and_slices=specs, tensors=tensors
            )

    @classmethod
    def read(cls, folder: str, without: Container[str] = ()) -> Packed:
        """Reads the files of a checkpoint.

        Args:
            folder: The local folder that has them.
            without: Names of variables that are not read.

        Raises:
            DamagedError: A file is damaged.
            UnreadableError: A file cannot be read for another reason.
        """
        try:
            with tf.io.gfile.GFile(posixpath.join(folder, STATE), "r") as file:
                text = file.read()
            prefix = prefix_in(folder)
            dtypes = tf.train.load_checkpoint(prefix).get_variable_to_dtype_map()
            dtypes = {name: dtype for name, dtype in dtypes.items() if name not in without}
            with tf.device("CPU:0"):
                tensors = tf.raw_ops.RestoreV2(
                    prefix=prefix,
                    tensor_names=list(dtypes),
                    shape_and_slices=[""] * len(dtypes),
                    dtypes=list(dtypes.values()),
                )
            arrays = (t if t.dtype == tf.variant else np.asarray(t.numpy()) for t in tensors)
            return cls(text, dict(zip(dtypes, arrays, strict=True)))
        except (ValueError, tf.errors.OpError, RuntimeError) as error:
            raise manifest.error_of(folder, error) from error


@dataclass
class Snapshot:
    """The content of a checkpoint.

    Attributes:
        variables: Arrays, or tensors on the host, by name.
        paths: The Keras paths of the variables, by name.
        state: Everything else: nested dicts and lists of JSON values and arrays.
        shards: This rank's shards of the variables that are not in `variables`.
    """

    variables: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    shards: list[Shard] = field(default_factory=list)

    def packed(self) -> Packed:
        """Returns an immutable copy of the snapshot.

        Raises:
            TypeError: A value is neither JSON nor an array.
        """
        arrays: dict[str, Any] = dict(self.variables)
        state = _without_arrays(self.state, arrays, "state")
        text = json.dumps({"paths": self.paths, "state": state}, indent=1)
        return Packed(text, arrays, tuple(self.shards))

    @classmethod
    def unpacked(
        cls, packed: Packed, path: str = "the checkpoint", without: Container[str] = ()
    ) -> Snapshot:
        """Returns the snapshot that was packed.

        Args:
            packed: From `packed`.
            path: The path it was read from, for messages.
            without: Names of variables that were not read.

        Raises:
            DamagedError: The JSON does not have the expected structure.
        """
        try:
            content = json.loads(packed.text)
            names = [name for name in content["paths"] if name not in without]
            variables = {name: packed.arrays[name] for name in names}
            state = _with_arrays(content["state"], packed.arrays)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise DamagedError(f"{path} is damaged: cannot parse {STATE} ({reason})") from None
        return cls(variables, content["paths"], state)


def prefix_in(folder: str) -> str:
    """Returns the prefix of the TensorFlow checkpoint in a folder.

    Raises:
        ValueError: The folder does not have exactly one.
    """
    (index,) = (name for name in tf.io.gfile.listdir(folder) if name.endswith(".index"))
    return posixpath.join(folder, index.removesuffix(".index"))


def slice_specs(
    shape: tuple[int, ...], begin: int, end: int
) -> Iterator[tuple[str, Sequence[int]]]:
    """Yields the slices that are the elements `begin` to `end` of a flattened variable.

    Yields:
        The specification of a slice, for `SaveV2` and `RestoreV2`, and its shape.
    """
    for box in _boxes(shape, begin, end):
        where = ":".join(f"{first},{size}" for first, size in box)
        yield f"{' '.join(map(str, shape))} {where}", [size for _, size in box]


def _boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yields slices that together are the elements `begin` to `end` of a flattened array, in order.

    Args:
        shape: The shape of the array.
        begin: The first element.
        end: The element after the last one.
    """
    if len(shape) == 1:
        yield ((begin, end - begin),)
        return
    num = math.prod(shape[1:])  # elements of a row
    first, last = begin // num, end // num
    if begin % num or first == last:  # a part of a row
        stop = min(end, (first + 1) * num)
        for box in _boxes(shape[1:], begin - first * num, stop - first * num):
            yield ((first, 1), *box)
        first += 1
    if first < last:
        yield ((first, last - first), *((0, size) for size in shape[1:]))
    if first <= last and end % num:
        for box in _boxes(shape[1:], 0, end % num):
            yield ((last, 1), *box)


def _without_arrays(value: Any, arrays: dict[str, Any], name: str) -> Any:
    """Returns a structure for JSON, with its arrays moved to `arrays` under their paths."""
    if isinstance(value, Mapping):
        return {str(k): _without_arrays(v, arrays, f"{name}/{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_arrays(v, arrays, f"{name}/{i}") for i, v in enumerate(value)]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tf.Tensor):
        arrays[name] = value
        return _ARRAY + name
    if isinstance(value, np.ndarray):
        arrays[name] = value.copy()  # the caller may change the array while a thread writes it
        return _ARRAY + name
    return value


def _with_arrays(value: Any, arrays: Mapping[str, Any]) -> Any:
    """Returns a structure read from JSON, with its arrays in their places."""
    if isinstance(value, dict):
        return {k: _with_arrays(v, arrays) for k, v in value.items()}
    if isinstance(value, list):
        return [_with_arrays(v, arrays) for v in value]
    if isinstance(value, str) and value.startswith(_ARRAY):
        return arrays.get(value.removeprefix(_ARRAY))  # not every array is sent to every worker
    return value


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
