"""Which source of a mixture each example comes from, as a function of seed and place alone.

The draws come in periods: in each, every source has as many as its weight tells, in an order drawn
anew. So the proportions are exact, and how much of every source was taken before any place is known
without drawing what came before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

#: Draws after which the proportions are exact.
_PERIOD = 1000


class Draws:
    """The draws of a mixture.

    Args:
        weights: of the sources, relative to each other.
        seed: of the order in every period.

    Raises:
        ValueError: no weight, or one that is not positive or too small beside the others.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self._num_sources, self._seed = len(weights), seed
        self._sources = tf.constant(np.repeat(np.arange(len(weights)), _per_period(weights)))

    def taken_before(self, place: tf.Tensor) -> tf.Tensor:
        """How many examples of each source come before a place; int64 `(num_sources,)`."""
        period, within = place // _PERIOD, place % _PERIOD
        return period * self._counts(self._sources) + self._counts(self._of(period)[:within])

    def behind(self, place: tf.Tensor) -> tf.data.Dataset:
        """The number of the source of each example from a place on, for ever."""
        period, within = place // _PERIOD, place % _PERIOD
        periods = tf.data.Dataset.range(period, tf.int64.max)
        return periods.map(self._of).unbatch().skip(within)

    def _of(self, period: tf.Tensor) -> tf.Tensor:
        pair = tf.stack([tf.constant(self._seed, tf.int64), period])
        return tf.random.experimental.stateless_shuffle(self._sources, pair)

    def _counts(self, sources: tf.Tensor) -> tf.Tensor:
        counts = tf.math.bincount(tf.cast(sources, tf.int32), minlength=self._num_sources)
        return tf.cast(counts, tf.int64)


def _per_period(weights: Sequence[float]) -> list[int]:
    """How many draws of a period each source has, at least one; the largest remainders first."""
    given = np.array(weights, np.float64)
    if not len(given) or not np.all(given > 0) or not np.all(np.isfinite(given)):
        raise ValueError(f"sources: expected positive weights, got {given.tolist()}")
    exact = given / given.sum() * _PERIOD
    counts = np.floor(exact).astype(int)
    counts[np.argsort(counts - exact, kind="stable")[: _PERIOD - counts.sum()]] += 1
    if not np.all(counts):
        raise ValueError(
            f"sources: expected weights of at least {1 / _PERIOD:.1%} of all, got "
            f"{given.tolist()}; leave the smallest out, or put folders together"
        )
    return counts.tolist()
