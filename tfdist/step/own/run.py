"""What a user's step asks, in a run of it, that depends on more than its own rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import keras
import tensorflow as tf

if TYPE_CHECKING:
    from tfdist.step.own.scope import OwnScope


class Run(Protocol):
    """Who answers it."""

    def gradients(self, compute: Callable[[], list], inner: bool) -> list:
        """Returns the gradients of variables.

        Args:
            compute: Takes those of this run's rows.
            inner: Whether another tape records, so that the gradients are part of a loss.
        """

    def result(self, scope: OwnScope, metric: keras.Metric, compute: Callable[[], Any]) -> Any:
        """Returns the result of a metric, which `compute` takes from the values in the scope."""

    def seed(self, drawn: tf.Tensor) -> tf.Tensor:
        """Returns the seed with which to draw where a generator gave this one."""


class OwnRows:
    """A `Run` whose rows are all there are: the whole batch, or a trial."""

    def gradients(self, compute: Callable[[], list], inner: bool) -> list:
        del inner
        return compute()

    def result(self, scope: OwnScope, metric: keras.Metric, compute: Callable[[], Any]) -> Any:
        del scope, metric
        return compute()

    def seed(self, drawn: tf.Tensor) -> tf.Tensor:
        return drawn
