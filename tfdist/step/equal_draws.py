"""Random numbers that do not distinguish rows, for probes.

Every draw is one row, repeated, and the same for some of the rows as for all of them. So a probe
can compare what is computed from parts of a batch even though random numbers are drawn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf

from tfdist.upstream.patching import replaced

_STATELESS = ("stateless_normal", "stateless_uniform", "stateless_truncated_normal")


@contextmanager
def draws_alike_for_all_rows() -> Iterator[None]:
    """Patches random functions to draw equal rows; the n-th draw is always the same."""
    drawn = 0

    def stateful(function: Callable[..., Any]) -> Callable[..., Any]:
        def draw(shape: Any, *args: Any, seed: Any = None, **options: Any) -> tf.Tensor:
            nonlocal drawn
            drawn += 1
            names = ("minval", "maxval") if function is uniform else ("mean", "stddev")
            return function(shape, (17, drawn), **_by_name(names, args), **options)

        return draw

    normal, uniform, truncated = (_one_row(getattr(tf.random, name)) for name in _STATELESS)
    instead: list[tuple[Any, str, Any]] = [
        *zip([tf.random] * 3, _STATELESS, (normal, uniform, truncated), strict=True),
        (tf.random, "normal", stateful(normal)),
        (tf.random, "uniform", stateful(uniform)),
        (tf.random, "truncated_normal", stateful(truncated)),
        (tf.random, "shuffle", lambda value, *args, **options: value),
        (tf.random.experimental, "stateless_shuffle", lambda value, *args, **options: value),
        (tf.random, "stateless_categorical", _most_likely),
        (tf.random, "categorical", _most_likely),
        (tf.nn.experimental, "stateless_dropout", functools.partial(_dropout, uniform)),
        (tf.nn, "dropout", lambda x, rate, *_, **__: _dropout(uniform, x, rate, (17, 0))),
    ]
    with ExitStack() as stack:
        for owner, name, function in instead:
            stack.enter_context(replaced(owner, name, function))
        yield


def _by_name(names: tuple[str, ...], given: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip((*names, "dtype"), given, strict=False))


def _one_row(function: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Returns a function that draws one row and repeats it."""

    def draw(shape: Any, seed: Any, *args: Any, **options: Any) -> tf.Tensor:
        shape = tf.cast(tf.convert_to_tensor(shape), tf.int32)
        one = tf.concat([tf.minimum(shape[:1], 1), shape[1:]], 0)
        return tf.broadcast_to(function(one, seed, *args, **options), shape)

    return draw


def _most_likely(logits: tf.Tensor, num_samples: int, *args: Any, **options: Any) -> tf.Tensor:
    dtype = options.get("dtype", tf.int64)
    return tf.repeat(tf.argmax(logits, -1, dtype)[:, None], num_samples, 1)


def _dropout(uniform: Any, x: tf.Tensor, rate: Any, seed: Any, *_: Any, **__: Any) -> tf.Tensor:
    mask = uniform(tf.shape(x), seed, dtype=tf.float32) >= tf.cast(rate, tf.float32)
    return tf.where(mask, x / tf.cast(1 - rate, x.dtype), tf.zeros_like(x))
