"""Random numbers of one device: each replica draws its rows of the global batch's draw.

Keras's seeds are the same on every replica, and TensorFlow's stateless samplers number their
outputs by a counter (Philox; Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
The numbers for some rows are therefore those of the whole draw with the counter advanced. This is
done to every draw whose leading size comes from the batch. Other draws, such as noise on weights,
are the same on all replicas anyway.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf

from tfdist.patches.sizes_on_host import on_host
from tfdist.replica import replica as replicas
from tfdist.replica.replica import Replica
from tfdist.strategies.batches import OWN_ROWS_APART
from tfdist.upstream.patching import replaced
from tfdist.upstream.tensorflow_random import (
    Sampler,
    leads_by_rows,
    samplers_called_by,
    stateful_samplers_noted,
    static_shape,
)

_log = logging.getLogger(__name__)

#: Separates the replicas' draws where they cannot be rows of one draw: added to a key, times the
#: number of the microbatch. The first draws what one device draws.
_KEY_STRIDE = 0x9E3779B9
#: Distributions whose samplers take a shape, but no counter: their parameters.
_BY_SHAPE = {
    "stateless_gamma": ("alpha", "beta"),
    "stateless_binomial": ("counts", "probs"),
    "stateless_poisson": ("lam",),
}


@contextmanager
def draws_of_one_device() -> Iterator[None]:
    """Makes random numbers in a replica's step those that one device draws for the same rows."""
    with ExitStack() as stack:
        stack.enter_context(samplers_called_by(_draw))
        stack.enter_context(stateful_samplers_noted(_warn_of_stateful))
        for name in _BY_SHAPE:
            sampler = getattr(tf.random, name)
            stack.enter_context(
                replaced(tf.random, name, functools.partial(_by_shape, name, sampler))
            )
        categorical = functools.partial(_categorical, tf.random.stateless_categorical)
        stack.enter_context(replaced(tf.random, "stateless_categorical", categorical))
        yield


def _draw(sampler: Sampler, shape: Any, key: tf.Tensor, counter: tf.Tensor) -> tf.Tensor:
    """Draws numbers on the replica that is being traced; see `samplers_called_by`."""
    replica = replicas.current()
    by_rows = _comes_from_batch(shape, replica)
    if replica is None or by_rows is False:
        return sampler.draw(shape, key=key, counter=counter)
    if by_rows and replica.in_xla and not sampler.is_uniform:
        return _rows_of_whole(sampler, tf.convert_to_tensor(shape), key, counter, replica)
    if by_rows is None:
        key = _shifted(key, tf.cast(replica.microbatch, tf.int64))
        return sampler.draw(shape, key=key, counter=counter)
    return _rows(sampler, tf.convert_to_tensor(shape), key, counter, replica)


def _comes_from_batch(shape: Any, replica: Replica | None) -> bool | None:
    """Returns whether the leading size of a draw is that of the batch, or a multiple of it.

    Returns:
        None if that is unknown, which is logged: then each replica draws its own numbers.
    """
    if replica is None or replica.num_microbatches == 1 or not (known := static_shape(shape)).rank:
        return False
    if tf.executing_eagerly():
        if tf.is_symbolic_tensor(replica.num_rows):
            return False  # a dry run, while a replica is traced
        # Nothing tells where the size comes from. Other sizes are rarely the same.
        return known[0] == max(int(replica.num_rows), 1)
    if known[0] is not None:
        return False
    if (by_rows := leads_by_rows(tf.convert_to_tensor(shape))) is None:
        _warn(
            replica,
            f"Each replica draws its own random numbers of shape {known}, because their leading "
            "size was not recognized as a multiple of the batch's rows. Results differ from one "
            "device.",
        )
    return by_rows


def _warn_of_stateful(name: str) -> None:
    """Warns of numbers that depend on how often an operation has run, here on each replica."""
    replica = replicas.current()
    if replica is not None and replica.num_microbatches > 1 and not tf.executing_eagerly():
        _warn(
            replica,
            f"Each replica draws its own numbers with {name}, which keeps a state for each "
            "operation. Results differ from one device. Use keras.random or tf.random.stateless_* "
            "instead.",
        )


def _warn(replica: Replica, message: str) -> None:
    if not (isinstance(replica.index, int) and replica.index):
        _log.warning(message)


def _rows(
    sampler: Sampler, shape: tf.Tensor, key: tf.Tensor, counter: tf.Tensor, replica: Replica
) -> tf.Tensor:
    """Draws the rows of a microbatch: from the group of its first number on."""
    group = sampler.group
    with on_host():
        num_rows = tf.cast(tf.maximum(replica.num_rows, 1), tf.int64)  # a row of padding
        size = tf.reduce_prod(tf.cast(shape, tf.int64))
        first = tf.cast(replica.first_row, tf.int64) * (size // num_rows)
        # TensorFlow adds no uint64 on every device; as int64 they wrap around to the same bits.
        steps = tf.stack([first // group * sampler.counters, tf.zeros([], tf.int64)])
        counter = tf.bitcast(tf.bitcast(counter, tf.int64) + steps, tf.uint64)
        begin, sizes = tf.stack([first % group]), tf.stack([size])
        drawn = sizes + group - 1  # the first number may be within a group
    if any(length is not None and length % group == 0 for length in static_shape(shape)[1:]):
        return sampler.draw(shape, key=key, counter=counter)  # every row begins a group
    flat = sampler.draw(drawn, key=key, counter=counter)
    return tf.reshape(tf.slice(flat, begin, sizes), shape)


def _rows_of_whole(
    sampler: Sampler, shape: tf.Tensor, key: tf.Tensor, counter: tf.Tensor, replica: Replica
) -> tf.Tensor:
    """Draws the global batch's numbers, and returns a microbatch's rows of them.

    XLA computes normal numbers in pairs whose distance depends on the size of the draw, so that no
    counter gives the later rows alone.
    """
    begin, size, total = _span(shape[0], replica)
    key = _shifted(key, tf.cast(replica.first_row, tf.int64) // OWN_ROWS_APART)
    whole = sampler.draw(tf.concat([[total], shape[1:]], 0), key=key, counter=counter)
    starts = tf.concat([[begin], tf.zeros_like(shape[1:])], 0)
    return tf.slice(whole, starts, tf.concat([[size], shape[1:]], 0))


def _by_shape(
    name: str, sampler: Callable[..., tf.Tensor], *args: Any, **options: Any
) -> tf.Tensor:
    """Draws where samplers take no counter: its rows of the global batch's numbers."""
    given = inspect.signature(sampler).bind(*args, **options).arguments
    shape, seed = given["shape"], given["seed"]
    replica = replicas.current()
    by_rows = _comes_from_batch(shape, replica)
    if replica is None or by_rows is False:
        return sampler(**given)
    if by_rows is None:
        return sampler(**given | {"seed": seed + tf.cast(replica.microbatch, seed.dtype)})
    shape = tf.convert_to_tensor(shape)
    begin, size, total = _span(shape[0], replica)
    for parameter in _BY_SHAPE[name]:
        value = given.get(parameter)
        if isinstance(value, tf.Tensor) and value.shape.rank == shape.shape[0]:
            given[parameter] = _padded(value, begin, size, total)
    whole = {"shape": tf.concat([[total], shape[1:]], 0), "seed": _own_rows_apart(seed, replica)}
    return sampler(**given | whole)[begin : begin + size]


def _categorical(
    sampler: Callable[..., tf.Tensor], logits: Any, num_samples: Any, seed: Any, **options: Any
) -> tf.Tensor:
    """Draws classes: those of the global batch with equal logits for other rows, then its rows."""
    logits, replica = tf.convert_to_tensor(logits), replicas.current()
    by_rows = _comes_from_batch(tf.shape(logits), replica)
    if replica is None or not by_rows:
        return sampler(logits, num_samples, seed, **options)
    begin, size, total = _span(tf.shape(logits)[0], replica)
    whole = _padded(logits, begin, size, total)
    seed = _own_rows_apart(seed, replica)
    return sampler(whole, num_samples, seed, **options)[begin : begin + size]


def _span(size: tf.Tensor, replica: Replica) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns where a leading size begins in the global batch's, the size, and the global size."""
    times = size // tf.maximum(replica.num_rows, 1)
    begin = tf.cast(tf.cast(replica.first_row, tf.int64) % OWN_ROWS_APART, tf.int32) * times
    return begin, size, tf.maximum(replica.total_rows * times, begin + size)


def _padded(value: tf.Tensor, begin: tf.Tensor, size: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
    """Puts rows at their place in the global batch."""
    around = [[begin, total - begin - size]] + [[0, 0]] * (value.shape.rank - 1)
    return tf.pad(value, around, constant_values=1)


def _own_rows_apart(seed: tf.Tensor, replica: Replica) -> tf.Tensor:
    """Gives workers that bring their own rows a seed each; others keep theirs."""
    worker = tf.cast(replica.first_row, tf.int64) // OWN_ROWS_APART
    return seed + tf.cast(worker, seed.dtype)


def _shifted(key: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(tf.bitcast(key, tf.int64) + number * _KEY_STRIDE, tf.uint64)
