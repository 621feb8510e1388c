"""The data of each epoch, where the global batch grows on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigurationError, DataError
from tfdist.loops.feed import Feed, check_batch_size
from tfdist.strategies.base import Strategy

#: Rows of a global batch by the epoch, from 0, from which on they hold.
BatchSizes = Mapping[int, int]


class Feeds:
    """A feed for each size of batch, over the same data.

    Training on them is the same as one `fit` after another, each with its batch size and
    `initial_epoch`. A `tf.data.Dataset` is batched anew, so that it is read, mapped and shuffled as
    it always is. Source of the practice: Smith et al. 2018, "Don't Decay the Learning Rate,
    Increase the Batch Size".

    Args:
        strategy: Splits the batches.
        x: Arrays or a `tf.data.Dataset` of batches.
        batch_sizes: A number, None, or by epoch.
        **options: Of `Feed`.

    Attributes:
        batch_size: To evaluate with, in the batches of the training where these are all alike.

    Raises:
        ConfigurationError: The sizes are none, or go with `steps_per_epoch`.
        DataError: The data cannot be batched anew; or as of `Feed`.
    """

    def __init__(
        self, strategy: Strategy, x: Any, batch_sizes: int | BatchSizes | None, **options: Any
    ) -> None:
        if not isinstance(batch_sizes, Mapping):
            self.batch_size = batch_sizes
            self._feeds = {0: Feed(strategy, x, batch_size=batch_sizes, **options)}
            return
        is_dataset = isinstance(x, tf.data.Dataset)
        self.batch_size = None if is_dataset else max(batch_sizes.values(), default=None)
        _check(batch_sizes, options.get("steps_per_epoch"))
        check_batch_size(min(batch_sizes.values()), strategy)
        make = _batched_anew(strategy, x, options)
        by_size = {size: make(size) for size in batch_sizes.values()}
        self._feeds = {epoch: by_size[batch_sizes[epoch]] for epoch in sorted(batch_sizes)}

    def of_epoch(self, number: int) -> Feed:
        """Returns the feed of an epoch, counted from 0."""
        return self._feeds[max(epoch for epoch in self._feeds if epoch <= number)]

    def all(self) -> list[Feed]:
        """Returns the feeds, in the order of the epochs that they are for."""
        return list(self._feeds.values())


def _batched_anew(strategy: Strategy, x: Any, options: Mapping[str, Any]) -> Callable[[int], Feed]:
    """Returns what makes the feed of a size."""
    if isinstance(x, tf.data.Dataset):
        return lambda size: Feed(strategy, x.rebatch(size), **options)
    if callable(x) or not all(hasattr(leaf, "shape") for leaf in tf.nest.flatten(x)):
        raise DataError(
            f"batch_size by epoch takes arrays or a tf.data.Dataset, got {type(x).__name__}: call "
            "fit once for each batch size, with initial_epoch."
        )
    return lambda size: Feed(strategy, x, batch_size=size, **options)


def _check(batch_sizes: BatchSizes, steps_per_epoch: int | None) -> None:
    fits = all(isinstance(n, int) for pair in batch_sizes.items() for n in pair)
    if not fits or 0 not in batch_sizes or min(batch_sizes) < 0 or min(batch_sizes.values()) < 1:
        raise ConfigurationError(
            f"batch_size={dict(batch_sizes)}: expected sizes from 1 by epoch, from epoch 0 on, "
            "like {0: 32, 5: 64}."
        )
    if steps_per_epoch is not None:
        raise ConfigurationError(
            "batch_size by epoch takes epochs that are passes over the data: leave "
            "steps_per_epoch out."
        )
