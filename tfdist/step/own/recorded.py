"""Runs of a user's step that are compared: one is recorded, and others go on with what it took."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfdist.step.own.run import OwnRows
from tfdist.step.own.scope import OwnScope


class Recorded(OwnRows):
    """The whole: keeps what the step took."""

    def __init__(self) -> None:
        self.inner = False
        self.taken: list[list] = []
        self.results: list[Any] = []

    def gradients(self, compute: Callable[[], list], inner: bool) -> list:
        self.inner |= inner
        self.taken.append(compute())
        return self.taken[-1]

    def result(self, scope: OwnScope, metric: keras.Metric, compute: Callable[[], Any]) -> Any:
        self.results.append(compute())
        return self.results[-1]


class Replayed(Recorded):
    """A part: goes on with what was recorded of the whole."""

    def __init__(self, whole: Recorded) -> None:
        super().__init__()
        self._whole = whole

    def gradients(self, compute: Callable[[], list], inner: bool) -> list:
        super().gradients(compute, inner)
        return self._whole.taken[len(self.taken) - 1]

    def result(self, scope: OwnScope, metric: keras.Metric, compute: Callable[[], Any]) -> Any:
        self.results.append(None)
        return self._whole.results[len(self.results) - 1]
