"""The model of a trainer in other hands: a plain Keras model, whose own methods are heard."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import hands
from tests.support.case import compiled
from tests.support.training import STRATEGIES, X, Y, assert_close, copies
from tfdist.trainer import Trainer

WORDS = ["a", "bb", "ccc", "dddd", "eeeee", "ff", "g"]
LENGTHS = np.asarray([[len(word)] for word in WORDS], "float32")


@pytest.mark.parametrize(("strategy", "devices"), STRATEGIES)
def test_it_is_plain_in_the_hands_of_a_callback(
    strategy: str, devices: int, tmp_path: Path
) -> None:
    trainer = Trainer(hands.build, strategy, devices=devices)
    hands.assert_plain_in_hands(trainer, tmp_path)
    for copy in copies(trainer.model)[1:]:
        assert_close(copy, trainer.model.get_weights())


def test_it_was_never_in_a_scope_of_tensorflow() -> None:
    made: list[keras.Model] = []

    def build() -> keras.Model:
        model = hands.build()
        made.append(keras.Model(model.inputs, model.layers[0].output))
        return model

    trainer = Trainer(build, "mirrored", devices=2)
    trainer.fit(X, Y, verbose=0)
    features = made[0].predict(X[:3], verbose=0)  # shares layers, and is no part of the model
    assert_close(features, trainer.model.layers[0](X[:3]).numpy())
    assert not any(isinstance(v.value, tf.distribute.DistributedValues) for v in made[0].variables)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_arguments_have_the_order_of_keras(method: str) -> None:
    ours, theirs = (inspect.signature(getattr(m, method)) for m in (Trainer, keras.Model))
    kept = [p for p in theirs.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in kept
    ]


class OfWords(keras.Model):
    """Takes strings, as KerasHub's tasks do: its own methods turn them into numbers first."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.epochs_seen = keras.layers.Dense(1), 0

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def _numbers(self, x: Any, y: Any = None, batch_size: int | None = None) -> tf.data.Dataset:
        if isinstance(x, tf.data.Dataset):
            data = x.unbatch()
        else:
            data = tf.data.Dataset.from_tensor_slices(x if y is None else (x, y))
        length = lambda word, *y: (tf.cast(tf.strings.length(word), tf.float32)[:, None], *y)  # noqa: E731
        return data.batch(batch_size or 32).map(length)

    def fit(self, x: Any, y: Any = None, batch_size: int | None = None, **options: Any) -> Any:
        def count(epoch: int, logs: Any) -> None:
            self.epochs_seen += 1

        counting = keras.callbacks.LambdaCallback(on_epoch_end=count)
        validation = tf.data.Dataset.from_tensor_slices(options.pop("validation_data")).batch(3)
        return super().fit(
            self._numbers(x, y, batch_size),
            validation_data=validation, callbacks=[counting], **options,
        )  # fmt: skip

    def evaluate(self, x: Any, y: Any = None, batch_size: int | None = None, **options: Any) -> Any:
        options.pop("_use_cached_eval_dataset", None)
        return super().evaluate(self._numbers(x, y, batch_size), **options)

    def predict(self, x: Any, batch_size: int | None = None, **options: Any) -> Any:
        return super().predict(self._numbers(x, batch_size=batch_size), **options)


def of_words() -> keras.Model:
    keras.utils.set_random_seed(1)
    return compiled(OfWords(), keras.optimizers.SGD(0.01))


def test_methods_that_its_class_overrides_are_heard() -> None:
    trainer, plain = Trainer(of_words, "mirrored", devices=2), of_words()

    def numbers(runner: Any, model: keras.Model) -> list[Any]:
        options: dict[str, Any] = {"batch_size": 3, "verbose": 0}
        checked = {"validation_data": (WORDS[:4], LENGTHS[:4]), "epochs": 2}
        history = runner.fit(WORDS, LENGTHS, **options, **checked).history
        loss = runner.evaluate(WORDS, LENGTHS, **options)
        return [dict(history), loss, runner.predict(WORDS, **options), *model.get_weights()]

    found = numbers(trainer, trainer.model)
    assert_close(found, numbers(plain, plain))
    assert trainer.model.epochs_seen == 2
    assert trainer.strategy.num_replicas == len(copies(trainer.model))  # they did the work
    assert_close(trainer.model.predict(WORDS, verbose=0), found[2])
