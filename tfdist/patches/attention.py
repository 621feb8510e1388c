"""Attention of long sequences in chunks of queries, with memory that is linear in their length."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tfdist.upstream.keras_layers import attention_computed_by

#: Queries of a chunk. Its scores take 4 bytes for each of them, each key, head and sequence.
_CHUNK = 128
#: Queries times keys from which on memory matters more than time: on CPUs, the chunks then take 1.7
#: times the processor time, and a fifth of the memory.
_LEAST_SCORES = 2048 * 2048


def attention_in_chunks() -> AbstractContextManager[None]:
    """Computes dot-product attention of long sequences chunk by chunk.

    Keras computes the scores of all queries and keys at once, in float32, and keeps them for the
    backward pass: memory grows with the square of the length. Here, Keras's function computes the
    rows of one chunk of queries at a time, and again in the backward pass. The rows of a softmax
    are independent, so that outputs differ by rounding only.

    Attention with a bias or returned scores, in a layer with active dropout, or of sequences of
    unknown length is left to Keras.
    """
    return attention_computed_by(_in_chunks, is_long)


def is_long(query: tf.Tensor, key: tf.Tensor) -> bool:
    """Returns whether attention of `(batch, length, heads, size)` tensors is computed in chunks."""
    if query.shape.rank != 4 or key.shape.rank != 4 or None in query.shape[1:] + key.shape[1:]:
        return False
    return query.shape[1] > _CHUNK and query.shape[1] * key.shape[1] >= _LEAST_SCORES


def _in_chunks(
    plain: Callable[..., tf.Tensor],
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    scale: Any = None,
    is_causal: bool = False,
    **options: Any,
) -> tf.Tensor:
    """Computes what Keras's `dot_product_attention` does; arguments are its own."""
    query, key, value = (tf.convert_to_tensor(tensor) for tensor in (query, key, value))
    mask = None if mask is None else tf.convert_to_tensor(mask)
    length = query.shape[1]
    is_split = mask is not None and mask.shape.rank == 4 and mask.shape[2] == length
    is_same = mask is None or (mask.shape.rank == 4 and mask.shape[2] == 1)
    if bias is not None or not is_long(query, key) or not (is_split or is_same):
        return plain(query, key, value, bias, mask, scale, is_causal, **options)
    num_chunks = -(-length // _CHUNK)
    parts = None if mask is None else _chunks(mask, 2, num_chunks) if is_split else mask

    def of_chunk(number: tf.Tensor, rows: tf.Tensor, key: Any, value: Any) -> tf.Tensor:
        part = tf.gather(parts, number, axis=2) if is_split else parts
        if is_causal:
            last = number * _CHUNK + tf.range(_CHUNK)
            causal = (last[:, None] >= tf.range(key.shape[1])[None])[None, None]
            part = causal if part is None else causal & part
        return plain(rows, key, value, None, part, scale, False, **options)

    @tf.custom_gradient
    def attend(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> Any:
        rows = _chunks(query, 1, num_chunks)

        def add(number: tf.Tensor, outputs: tf.TensorArray) -> Any:
            output = of_chunk(number, tf.gather(rows, number, axis=1), key, value)
            return number + 1, outputs.write(number, output)

        outputs = tf.TensorArray(value.dtype, num_chunks)
        output = _joined(_loop(num_chunks, add, outputs)[0], length)

        def backward(upstream: tf.Tensor) -> list[tf.Tensor]:
            above = _chunks(upstream, 1, num_chunks)

            def add(number: tf.Tensor, dq: tf.TensorArray, dk: tf.Tensor, dv: tf.Tensor) -> Any:
                inputs = [tf.gather(rows, number, axis=1), key, value]
                with tf.GradientTape() as tape:
                    tape.watch(inputs)
                    output = of_chunk(number, *inputs)
                of_rows, *more = tape.gradient(output, inputs, tf.gather(above, number, axis=1))
                dk, dv = (d + tf.cast(m, d.dtype) for d, m in zip((dk, dv), more, strict=True))
                return number + 1, dq.write(number, of_rows), dk, dv

            # The sums over all chunks are rounded once.
            wide = tf.float64 if key.dtype == tf.float64 else tf.float32
            zeros = [tf.zeros_like(tensor, wide) for tensor in (key, value)]
            dq, *sums = _loop(num_chunks, add, tf.TensorArray(query.dtype, num_chunks), *zeros)
            return [_joined(dq, length), *(tf.cast(s, key.dtype) for s in sums)]

        return output, backward

    return attend(query, key, value)


def _loop(num_chunks: int, body: Callable[..., Any], *values: Any) -> list[Any]:
    """Calls a function for each chunk, one after the other, as only one of them has memory."""
    variables = (tf.constant(0), *values)
    one_by_one = {"parallel_iterations": 1, "maximum_iterations": num_chunks}
    return list(tf.while_loop(lambda n, *_: n < num_chunks, body, variables, **one_by_one))[1:]


def _chunks(tensor: tf.Tensor, axis: int, num_chunks: int) -> tf.Tensor:
    """Divides an axis into chunks of `_CHUNK`, padded with zeros: one more axis."""
    missing = num_chunks * _CHUNK - tensor.shape[axis]
    paddings = [[0, missing if i == axis else 0] for i in range(tensor.shape.rank)]
    sizes = [-1 if size is None else size for size in tensor.shape]
    sizes[axis : axis + 1] = [num_chunks, _CHUNK]
    return tf.reshape(tf.pad(tensor, paddings), sizes)


def _joined(chunks: tf.TensorArray, length: int) -> tf.Tensor:
    """Returns the rows of all chunks as one tensor `(batch, length, heads, size)`."""
    stacked = chunks.stack()
    rows = tf.transpose(stacked, [1, 0, 2, 3, 4])
    return tf.reshape(rows, [-1, rows.shape[1] * _CHUNK, *rows.shape[3:]])[:, :length]
