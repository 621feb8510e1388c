"""With `steps_per_execution`, the number of steps and the callbacks' batches are Keras's."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tests.support.training import X, Y, build
from tfdist.trainer import Trainer


class Heard(keras.callbacks.Callback):
    """Keeps which batches begin and end, and of how many rows the outputs are."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []
        for loop in ("train", "test", "predict"):
            setattr(self, f"on_{loop}_batch_begin", self._begin)
            setattr(self, f"on_{loop}_batch_end", self._end)

    def _begin(self, batch: int, logs: Any = None) -> None:
        self.told.append(batch)

    def _end(self, batch: int, logs: Any = None) -> None:
        self.told.append((batch, len((logs or {}).get("outputs", ()))))


def called(model: Any, weights_of: keras.Model) -> list[Any]:
    """Calls everything with steps that do not divide; returns what was heard and came of it."""
    heard, x, y = Heard(), X[:14], Y[:14]
    options: dict[str, Any] = {"batch_size": 2, "callbacks": [heard], "verbose": 0}
    model.fit(x, y, epochs=3, steps_per_epoch=3, shuffle=False, **options)
    found = [*weights_of.get_weights(), model.evaluate(x, y, steps=3, **options)]
    found += [model.predict(x, **options), model.predict(x, steps=3, **options)]
    return [heard.told, found]


def test_as_many_as_in_keras() -> None:
    plain = build(steps_per_execution=2)
    trainer = Trainer(lambda: build(steps_per_execution=2), "mirrored", devices=2)
    (told, wanted), (heard, found) = called(plain, plain), called(trainer, trainer.model)
    assert heard == told
    for one, another in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, another, 1e-5, 1e-6)
