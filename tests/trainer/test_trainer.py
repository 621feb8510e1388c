"""The trainer as a whole: rebuilding, recompiling, continuing, saving, steps per call."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

from tests.support.training import (
    FIT,
    STRATEGIES,
    X,
    Y,
    assert_close,
    assert_same_weights,
    build,
    building,
    mirrored,
    momentum,
    reference,
    steps,
)
from tfdist.trainer import Trainer


@pytest.fixture(scope="module")
def plain() -> keras.Model:
    """The model trained by plain Keras for three epochs."""
    model = momentum()
    model.fit(**FIT, epochs=3)
    return model


@pytest.mark.parametrize(("strategy", "num_replicas"), STRATEGIES)
def test_second_trainer_in_a_process(strategy: str, num_replicas: int) -> None:
    for _ in range(2):
        trainer = Trainer(build, strategy, devices=num_replicas)
        history = trainer.fit(**FIT, epochs=2)
        assert_close(history.history, reference().history.history)
        assert_same_weights(trainer.model, reference())


def test_trainer_for_the_model_of_another_trainer(plain: keras.Model) -> None:
    trainer = mirrored(momentum)
    trainer.fit(**FIT)
    for strategy in ("central_storage", "mirrored"):
        trainer = Trainer(trainer.model, strategy, devices=2)
        trainer.fit(**FIT)
    assert_same_weights(trainer.model, plain)
    assert steps(trainer.model) == steps(plain)


def test_deleted_trainer_is_garbage_collected() -> None:
    trainer = mirrored()
    trainer.fit(**FIT)
    trainer.predict(X, verbose=0)
    left = [weakref.ref(trainer), weakref.ref(trainer.model)]
    del trainer
    gc.collect()
    assert [ref() for ref in left] == [None, None]


def test_second_fit_continues_training(plain: keras.Model) -> None:
    trainer = mirrored(momentum)
    for _ in range(3):
        trainer.fit(**FIT)
    assert_same_weights(trainer.model, plain)


def test_saved_model_continues_in_plain_keras(plain: keras.Model, tmp_path: Path) -> None:
    trainer = mirrored(momentum)
    trainer.fit(**FIT, epochs=2)
    trainer.model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert_close(loaded.predict(X, verbose=0), trainer.predict(X, verbose=0))
    assert_close(loaded.fit(**FIT).history["loss"], plain.history.history["loss"][2:])
    assert_same_weights(loaded, plain)


@pytest.mark.parametrize("steps_per_call", [1, 2, 10])
def test_batch_callbacks_see_every_batch_for_any_steps_per_call(steps_per_call: int) -> None:
    seen: list[int] = []

    class Batches(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(batch)

    trainer = mirrored(steps_per_call=steps_per_call)
    trainer.fit(**FIT, epochs=2, callbacks=[Batches()])
    assert_same_weights(trainer.model, reference())
    assert seen == {1: [0, 1, 2], 2: [1, 2], 10: [2]}[steps_per_call] * 2


def test_accumulated_gradients_outlast_other_calls_and_data() -> None:
    def accumulating() -> keras.Model:
        return build(keras.optimizers.SGD(0.1, gradient_accumulation_steps=4))

    def fit_three_times(fit: Any) -> None:
        every_batch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
        fit(**FIT)
        fit(**FIT, callbacks=[every_batch])
        rows = tf.data.Dataset.from_tensor_slices((X, Y))
        fit(rows.filter(lambda x, y: True).batch(7), shuffle=False, verbose=0)  # unknown length

    trainer, plain = mirrored(accumulating), accumulating()
    fit_three_times(trainer.fit)
    fit_three_times(plain.fit)
    assert_same_weights(trainer.model, plain)


@pytest.mark.filterwarnings("ignore:The model was compiled outside")
@pytest.mark.parametrize(("strategy", "num_replicas"), STRATEGIES)
def test_model_recompiled_between_fits_matches_keras(strategy: str, num_replicas: int) -> None:
    def fit_twice(model: keras.Model, fit: Any) -> dict[str, list[float]]:
        fit(**FIT)
        model.layers[0].trainable = False
        optimizer = keras.optimizers.SGD(0.2, momentum=0.5)
        model.compile(optimizer, "mae", metrics=[keras.metrics.MeanSquaredError()])
        history = fit(**FIT, epochs=2, validation_data=(X[:5], Y[:5])).history
        assert model.optimizer is optimizer
        return history

    trainer, alone = Trainer(build, strategy, devices=num_replicas), build()
    result = fit_twice(trainer.model, trainer.fit)
    assert_close(result, fit_twice(alone, alone.fit))
    assert_same_weights(trainer.model, alone)
    assert steps(trainer.model) == steps(alone) == 6


def test_predict_uses_the_current_weights() -> None:
    trainer = mirrored()
    trainer.predict(X, verbose=0)
    trainer.model.set_weights(reference().get_weights())
    assert_close(trainer.predict(X, verbose=0), reference().predict(X, verbose=0))


class Eagerness(layers.Layer):
    """Records whether it is called eagerly."""

    def __init__(self, note: Callable[[bool], None]) -> None:
        super().__init__()
        self.note = note

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        self.note(tf.executing_eagerly())
        return inputs


@pytest.mark.parametrize(("strategy", "num_replicas"), STRATEGIES)
def test_run_eagerly_calls_layers_eagerly(strategy: str, num_replicas: int) -> None:
    seen: list[bool] = []
    build_model = building(
        lambda: [keras.Input((4,)), Eagerness(seen.append), layers.Dense(1)], run_eagerly=True
    )
    trainer, alone = Trainer(build_model, strategy, devices=num_replicas), build_model()
    assert_close(trainer.fit(**FIT).history, alone.fit(**FIT).history)

    def calls(runner: Any) -> list[bool]:
        seen.clear()
        for call in (runner.fit, runner.evaluate):
            call(X, Y, batch_size=15, verbose=0)
        runner.predict(X, verbose=0)
        return list(seen)

    assert calls(trainer) == calls(alone)
    assert all(seen)


def test_throughput_excludes_the_first_call() -> None:
    trainer = mirrored(steps_per_call=1)
    trainer.fit(X[:7], Y[:7], verbose=0)
    assert trainer.stats.examples_per_second == 0.0
    trainer.fit(**FIT)
    assert trainer.stats.examples_per_second > 0.0
    assert 0.0 <= trainer.stats.data_wait_share <= 1.0


def test_describe_lists_the_settings_of_the_trainer() -> None:
    build_model = building(
        lambda: [keras.Input((4,)), layers.BatchNormalization(), layers.Dense(1)]
    )
    facts = mirrored(build_model, accumulate=2, precision="mixed_bfloat16").describe()
    assert facts["strategy"] == "mirrored"
    assert facts["replicas"] == "2"
    assert facts["accumulation"] == "2 rounds"
    assert facts["precision"] == "mixed_bfloat16"
    assert "BatchNorm" in facts["not exact"]
    assert mirrored(build_model, sync_batch_norm=True).describe()["not exact"] == "nothing"
    assert mirrored().describe()["not exact"] == "nothing"


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_recurrent_layers_are_random_only_with_dropout(dropout: float) -> None:
    trainer = mirrored(
        building(lambda: [keras.Input((3, 2)), layers.LSTM(2, recurrent_dropout=dropout)]),
        replica_random=True,
    )
    assert ("random layers" in trainer.describe()["not exact"]) == (dropout > 0)


def test_first_fit_warns_about_inexact_layers(capsys: pytest.CaptureFixture[str]) -> None:
    build_model = building(
        lambda: [
            keras.Input((4,)),
            layers.BatchNormalization(),
            layers.Dropout(0.1),
            layers.Dense(1),
        ]
    )
    trainer = mirrored(build_model, replica_random=True)
    for verbose in (0, 2, 2):
        trainer.fit(**FIT | {"verbose": verbose})
    output = " ".join(capsys.readouterr().out.split())
    assert (
        output.count("not exact: BatchNorm: each replica uses its own moments; use sync_batch_norm")
        == 1
    )
    assert output.count("random layers: each replica uses different random numbers") == 1
    assert output.index("not exact") < output.index("loss")
    described = mirrored(build_model)
    described.describe()
    for silent in (described, mirrored(build)):
        silent.fit(**FIT | {"verbose": 2})
    output = capsys.readouterr().out
    assert "not exact" not in output
    assert "is not changed" not in output
    mirrored(build()).fit(**FIT | {"verbose": 2})
    assert "The model that you passed is not changed" in capsys.readouterr().out


def test_helpers_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    trainer = Trainer(model, "one_device")
    assert trainer.is_chief
    trainer.print("step", 1, sep="-")
    trainer.wait_for_everyone()
    assert capsys.readouterr().out == "step-1\n"
