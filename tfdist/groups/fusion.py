"""Tensor fusion: small tensors are packed into one, for communication or for fewer operations."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.cluster.remote import connection
from tfdist.upstream.tensorflow_graphs import traces_for_xla

#: Tensors with fewer elements are packed together. For larger ones (from 1 MB of float32), the copy
#: costs more than a separate collective.
FUSION_LIMIT = 1 << 18

Reduce = Callable[[list], list]


def fused(reduce: Reduce, tensors: list) -> list:
    """Applies `reduce` to tensors, with small dense ones packed into one per dtype.

    Args:
        reduce: Takes a list of tensors and returns the reduced list; element-wise.
        tensors: Dense tensors or `tf.IndexedSlices`, in any mix of shapes and dtypes.

    Returns:
        The reduced tensors, in the order given.
    """
    if not tensors:
        return []
    few, apart = packed(tensors)
    return apart(reduce(few))


def packed(tensors: list) -> tuple[list, Reduce]:
    """Packs the small dense tensors of a list into one per dtype.

    Returns:
        The packs and the other tensors, and a function that turns such a list, perhaps in another
        graph, back into tensors in the given order.
    """
    packs: dict[tf.DType, list[int]] = defaultdict(list)
    alone = []
    for position, tensor in enumerate(tensors):
        if has_size(tensor) and math.prod(tensor.shape) < FUSION_LIMIT:
            packs[tensor.dtype].append(position)
        else:
            alone.append(position)
    few = [
        tf.concat([tf.reshape(tensors[i], [-1]) for i in positions], 0)
        for positions in packs.values()
    ]
    shapes = {i: tensors[i].shape for positions in packs.values() for i in positions}

    def apart(reduced: list) -> list:
        results = dict(zip(alone, reduced[len(packs) :], strict=True))
        for positions, pack in zip(packs.values(), reduced, strict=False):
            parts = _split(pack, [math.prod(shapes[i]) for i in positions])
            results |= {
                i: tf.reshape(part, shapes[i]) for i, part in zip(positions, parts, strict=True)
            }
        return [results[position] for position in range(len(tensors))]

    return few + [tensors[i] for i in alone], apart


def packed_for_kernels(tensors: list) -> tuple[list, Reduce]:
    """Packs small tensors as `packed` does, for fewer kernels; not in a program of XLA.

    XLA fuses operations itself, and would read all packed tensors again for each result.
    """
    return (tensors, list) if traces_for_xla() else packed(tensors)


def in_chunks(reduce: Reduce, tensors: list[tf.Tensor], num_bytes: int) -> list[tf.Tensor]:
    """Applies `reduce` to dense tensors of known shape, and to large ones in chunks."""
    pieces: list[list[tf.Tensor]] = []
    for tensor in tensors:
        size, most = math.prod(tensor.shape), num_bytes // tensor.dtype.size
        sizes = [most] * (size // most) + ([size % most] if size % most else [])
        pieces.append(_split(tf.reshape(tensor, [-1]), sizes) if len(sizes) > 1 else [tensor])
    in_a_row = [piece for of_tensor in pieces for piece in of_tensor]
    reduced = iter(reduce(in_a_row) if in_a_row else [])
    results = []
    for tensor, of_tensor in zip(tensors, pieces, strict=True):
        parts = [next(reduced) for _ in of_tensor]
        results.append(tf.reshape(tf.concat(parts, 0), tensor.shape) if parts[1:] else parts[0])
    return results


def _split(vector: tf.Tensor, sizes: Sequence[int]) -> list[tf.Tensor]:
    if not vector.dtype.is_integer:
        return tf.split(vector, sizes)
    # `Split` and `SplitV` have no GPU kernel for int64, and would copy the vector to the host.
    begins = itertools.accumulate(sizes, initial=0)
    return [tf.slice(vector, [begin], [size]) for begin, size in zip(begins, sizes, strict=False)]


def by_dtype(reduce: Reduce, tensors: list) -> list:
    """Applies `reduce` once for each dtype."""
    return grouped(lambda tensor: tensor.dtype, reduce, tensors)


def by_device(reduce: Reduce, tensors: list) -> list:
    """Applies `reduce` once for each device that has tensors: there, or on this host if remote."""
    return on_each_device(reduce, tensors, connection.of_this_process)


def on_each_device(
    reduce: Reduce, tensors: list, place: Callable[[str], str] = lambda device: device
) -> list:
    """Applies `reduce` once for each device that has tensors: there, or where `place` says."""

    def there(tensors: list) -> list:
        with tf.device(place(tensors[0].device)):
            return reduce(tensors)

    return grouped(lambda tensor: tensor.device, there, tensors)


def grouped(key: Callable[[Any], Hashable], reduce: Reduce, items: list) -> list:
    """Applies `reduce` once to the items of each key, and returns its results in their order."""
    places: dict[Hashable, list[int]] = defaultdict(list)
    for position, item in enumerate(items):
        places[key(item)].append(position)
    results = {
        position: result
        for positions in places.values()
        for position, result in zip(positions, reduce([items[i] for i in positions]), strict=True)
    }
    return [results[position] for position in range(len(items))]


def has_size(tensor: tf.Tensor | tf.IndexedSlices) -> bool:
    """Returns whether a tensor is dense and has a known shape."""
    return not isinstance(tensor, tf.IndexedSlices) and tensor.shape.is_fully_defined()


def local_sum(terms: Sequence[Any]) -> Any:
    """Returns the sum of dense tensors, or the concatenated slices, on one device."""
    if not isinstance(terms[0], tf.IndexedSlices):
        return tf.add_n(list(terms))
    return tf.IndexedSlices(
        tf.concat([term.values for term in terms], 0),
        tf.concat([term.indices for term in terms], 0),
        terms[0].dense_shape,
    )


def wire_dtype(dtype: tf.DType, by_nccl: bool) -> tf.DType:
    """Returns the dtype for sending a tensor.

    Small integers are sent as int64, because TensorFlow keeps int32 in host memory, and NCCL and
    the ring support few other integer dtypes. TensorFlow's NCCL operations do not support bfloat16
    (`T` of `NcclAllReduce`, and `NcclManager::AddParticipant` for `CollectiveReduceV2`), which is
    converted to float32 without rounding.
    """
    if dtype.is_integer and dtype.size < tf.int64.size:
        return tf.int64
    if by_nccl and dtype == tf.bfloat16:
        return tf.float32
    return dtype


def copied_slice(whole: tf.Tensor, axis: int, begin: int, end: int) -> tf.Tensor:
    """Returns a copy of a slice along an axis, so that the whole tensor can be freed.

    Along the first axis, TensorFlow returns views. A variable would keep the view, and with it the
    whole tensor. Adding an axis in front avoids that.
    """
    before = [slice(None)] * axis
    return whole[tf.newaxis][(0, *before, slice(begin, end))]


def copied_slices(whole: tf.Tensor, axis: int, sizes: Sequence[int]) -> list[tf.Tensor]:
    """Returns consecutive slices of the given sizes along an axis: see `copied_slice`."""
    ends = itertools.accumulate(sizes, initial=0)
    return [copied_slice(whole, axis, *between) for between in itertools.pairwise(ends)]
