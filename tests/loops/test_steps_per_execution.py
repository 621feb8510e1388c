"""With `steps_per_execution`, the steps and the callbacks' batches are those of Keras."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tests.support.training import X, Y, build
from tfdist.trainer import Trainer


class Recorder(keras.callbacks.Callback):
    """Records the batches that begin and end, and the number of output rows."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []
        for loop in ("train", "test", "predict"):
            setattr(self, f"on_{loop}_batch_begin", self._begin)
            setattr(self, f"on_{loop}_batch_end", self._end)

    def _begin(self, batch: int, logs: Any = None) -> None:
        self.events.append(batch)

    def _end(self, batch: int, logs: Any = None) -> None:
        self.events.append((batch, len((logs or {}).get("outputs", ()))))


def called(model: Any, weights_of: keras.Model) -> list[Any]:
    """Runs all loops with indivisible steps, and returns the callback events and results."""
    recorder, x, y = Recorder(), X[:14], Y[:14]
    options: dict[str, Any] = {"batch_size": 2, "callbacks": [recorder], "verbose": 0}
    model.fit(x, y, epochs=3, steps_per_epoch=3, shuffle=False, **options)
    results = [*weights_of.get_weights(), model.evaluate(x, y, steps=3, **options)]
    results += [model.predict(x, **options), model.predict(x, steps=3, **options)]
    return [recorder.events, results]


def test_steps_and_batches_match_keras() -> None:
    plain = build(steps_per_execution=2)
    trainer = Trainer(lambda: build(steps_per_execution=2), "mirrored", devices=2)
    (keras_events, wanted), (events, found) = called(plain, plain), called(trainer, trainer.model)
    assert events == keras_events
    for one, another in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, another, 1e-5, 1e-6)
