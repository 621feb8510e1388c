"""A strategy that is written as CONTRIBUTING describes trains to the numbers of one device."""

from __future__ import annotations

import keras
import numpy as np

from tests.strategies.every_second_step import EverySecondStep
from tfdist import Trainer


def test_equals_accumulation_over_two_steps_on_one_device() -> None:
    inputs = np.random.default_rng(0).normal(size=(40, 5))
    labels = (inputs.sum(1, keepdims=True) > 0).astype("float64")

    def fit(strategy: EverySecondStep | None, accumulate: int | None) -> list[np.ndarray]:
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(8, "tanh", dtype="float64"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((5,)), *layers])
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=accumulate)
        model.compile(optimizer, "mse")
        if strategy is None:
            model.fit(inputs, labels, batch_size=7, epochs=2, shuffle=False, verbose=0)
            return model.get_weights()
        trainer = Trainer(model, strategy=strategy)
        trainer.fit(inputs, labels, batch_size=7, epochs=2, shuffle=False, verbose=0)
        return trainer.model.get_weights()

    results = fit(EverySecondStep(2), None)
    for result, expected in zip(results, fit(None, 2), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(results, fit(None, None), strict=True))
