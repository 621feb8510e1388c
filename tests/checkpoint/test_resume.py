"""Interrupted training resumes and ends with exactly the same state as uninterrupted training."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.checkpoint.training import build, fit, newest, repeatable, state, without_random_layers
from tests.support.training import X, Y
from tfdist.checkpoint.__main__ import main
from tfdist.checkpoint.settings import Checkpoints
from tfdist.checkpoint.store import Store
from tfdist.errors import ConfigurationError
from tfdist.trainer import Trainer

LONG = pytest.mark.long
#: Within an epoch; at its last step; within the validation after it.
STOPS = [
    ("one_device", "train 6"),
    pytest.param("one_device", "train 8", marks=LONG),
    pytest.param("one_device", "test 4", marks=LONG),
    pytest.param("mirrored", "train 6", marks=LONG),
    ("mirrored", "train 8"),
    ("mirrored", "test 4"),
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The final states of uninterrupted training, by strategy."""
    results = {}
    for strategy in ("one_device", "mirrored"):
        folder = tmp_path_factory.mktemp(strategy) / "checkpoints"
        results[strategy] = state(fit(folder, strategy), folder)
    return results


@pytest.mark.parametrize(("strategy", "stop"), STOPS)
def test_resumed_training_is_bitwise_identical(
    strategy: str, stop: str, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    with pytest.raises(KeyboardInterrupt):
        fit(folder, strategy, stop)
    resumed = state(fit(folder, strategy), folder)
    np.testing.assert_equal(resumed, uninterrupted[strategy])


def test_resumes_under_another_strategy(uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    folder, build_model = tmp_path / "checkpoints", without_random_layers
    for strategy, stop in (("mirrored", "train 3"), ("one_device", "train 4")):
        with pytest.raises(KeyboardInterrupt):
            fit(folder, strategy, stop, build_model=build_model)
    resumed = fit(folder, "towers", build_model=build_model)
    whole = fit(tmp_path / "other", build_model=build_model)
    for one, another in zip(resumed.model.weights, whole.model.weights, strict=True):
        np.testing.assert_allclose(one.numpy(), another.numpy(), 1e-5, 1e-6)


def test_complete_training_prints_a_message(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoints"
    first = state(fit(folder), folder)
    capfd.readouterr()
    again = state(fit(folder), folder)
    np.testing.assert_equal(again, first)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("Training is already complete after epoch 4: ")


def test_each_fit_has_its_own_checkpoints(tmp_path: Path) -> None:
    def train() -> list[np.ndarray]:
        trainer = Trainer(build, "one_device", checkpoints=Checkpoints(tmp_path))
        trainer.fit(X, Y, batch_size=8, epochs=1, verbose=0)
        trainer.fit(X, Y, batch_size=8, epochs=2, verbose=0)
        return [v.numpy() for v in trainer.model.weights]

    np.testing.assert_equal(train(), train())
    assert [place.epoch for place in Store(tmp_path / "fit-2").places()] == [2, 1]


class Counter(keras.callbacks.Callback):
    """A callback with saved state."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs_seen: list[int] = []
        self.sums = np.zeros(2)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs_seen.append(epoch)
        self.sums += epoch

    def get_state(self) -> dict[str, Any]:
        return {"epochs_seen": self.epochs_seen, "sums": self.sums}

    def set_state(self, state: dict[str, Any]) -> None:
        self.epochs_seen, self.sums = state["epochs_seen"], state["sums"]


def test_custom_callback_state_is_restored(tmp_path: Path) -> None:
    for epochs in (2, 3):
        counter = Counter()
        fit(tmp_path / "checkpoints", callbacks=[counter], epochs=epochs)
    assert counter.epochs_seen == [0, 1, 2]
    np.testing.assert_equal(counter.sums, [3.0, 3.0])


def test_checkpoint_of_another_model_raises(tmp_path: Path) -> None:
    fit(tmp_path / "checkpoints", epochs=1)
    with pytest.raises(ConfigurationError, match=r"is from another model: .*Build the same model"):
        fit(tmp_path / "checkpoints", build_model=without_random_layers, epochs=1)


def test_checkpoint_every_n_steps(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    fit(folder, every=3, epochs=2)
    assert [place.step for place in Store(folder).places()] == [8, 6, 3]
    assert newest(folder)


@pytest.mark.parametrize("every", [0, -3, "0s", "0h0m", "-10m", "10s5m"])
def test_interval_that_is_not_positive_is_an_error(every: str | int) -> None:
    with pytest.raises(ConfigurationError, match="a time above 0, like '10m'"):
        Checkpoints("checkpoints", every=every)


def dataset() -> tf.data.Dataset:
    """Returns a dataset that is shuffled in a new order on each pass."""
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(15, seed=3).batch(4)


def mapped() -> tf.data.Dataset:
    """Returns the same dataset mapped through Python, which has no state to save."""

    def same(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.ensure_shape(tf.numpy_function(np.array, [x], x.dtype), x.shape), y

    return dataset().map(same)


def generator() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for number in itertools.count():
        rows = np.arange(number, number + 4) % len(X)
        yield X[rows], Y[rows]


def endless() -> tf.data.Dataset:
    return dataset().repeat()


ENDLESS = {"steps_per_epoch": 4}


@pytest.mark.parametrize(
    ("make", "options", "stop"),
    [
        (dataset, {}, "train 6"),
        pytest.param(mapped, {}, "test 3", marks=LONG),
        pytest.param(endless, ENDLESS, "train 6", marks=LONG),
        (endless, ENDLESS, "test 3"),
        pytest.param(mapped, {}, "train 6", marks=LONG),
        pytest.param(generator, ENDLESS, "train 6", marks=LONG),
    ],
)
def test_data_position_is_restored(
    make: Callable[[], Any], options: dict[str, Any], stop: str, tmp_path: Path
) -> None:
    def train(name: str, stop: str = "") -> dict[str, Any]:
        folder = tmp_path / name
        keras.utils.set_random_seed(1)  # shuffling combines it with the op's seed
        trainer = fit(folder, "mirrored", stop, x=make(), y=None, batch_size=None, **options)
        result = state(trainer, folder)
        if make is endless:  # its saved state includes prefetched data, which depends on timing
            del result["checkpoint"]
        return result

    with pytest.raises(KeyboardInterrupt):
        train("stopped", stop)
    np.testing.assert_equal(train("stopped"), train("whole"))


def test_complete_training_reads_no_data(tmp_path: Path) -> None:
    num_rows = 0

    def count(x: np.ndarray) -> np.ndarray:
        nonlocal num_rows
        num_rows += 1
        return x

    def counted(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.ensure_shape(tf.numpy_function(count, [x], x.dtype), x.shape), y

    def train(name: str, *epochs: int) -> list[np.ndarray]:
        nonlocal num_rows
        keras.utils.set_random_seed(1)
        rows = tf.data.Dataset.from_tensor_slices((X, Y)).map(counted)
        data, trainer = rows.shuffle(len(X), seed=3).batch(4), repeatable(tmp_path / name)
        for number in epochs:
            num_rows = 0
            trainer.fit(data, epochs=number, verbose=0)
        return trainer.model.get_weights()

    train("first", 2)
    assert num_rows == 2 * len(X)
    train("first", 2)
    assert num_rows == 0
    # The shuffle of the next training continues after the epochs of the complete one.
    np.testing.assert_equal(train("first", 2, 1), train("whole", 2, 1))


@pytest.mark.parametrize("stop", [pytest.param("test 4", marks=LONG), "train 5"])
def test_accumulated_gradients_are_restored(stop: str, tmp_path: Path) -> None:
    def build_model() -> keras.Model:
        model = build()
        model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=3), "mse")
        return model

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "stopped", "mirrored", stop, build_model=build_model)
    states = [
        state(fit(tmp_path / name, "mirrored", build_model=build_model), tmp_path / name)
        for name in ("stopped", "whole")
    ]
    np.testing.assert_equal(*states)


def test_exported_checkpoint_loads_in_plain_keras(tmp_path: Path) -> None:
    trainer = fit(tmp_path / "checkpoints", epochs=1)
    for name in ("model.keras", "saved"):
        assert main(["export", str(tmp_path / "checkpoints"), str(tmp_path / name)]) == 0
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    saved = tf.saved_model.load(str(tmp_path / "saved"))  # keeps the variables alive
    served = saved.serve(tf.constant(X, tf.float32))
    for found in (loaded.predict(X, verbose=0), served):
        np.testing.assert_allclose(found, trainer.predict(X, verbose=0), 1e-6, 1e-6)


@pytest.mark.parametrize(
    ("to", "problem"),
    [
        ("no/m.keras", "/no does not exist. Create it first."),
        ("m.h6", "m.h6: expected a name that ends with .keras or .weights.h5, or a folder without"),
    ],
)
def test_export_to_an_invalid_path_is_an_error(
    to: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path / "checkpoints", epochs=1)
    assert main(["export", str(tmp_path / "checkpoints"), str(tmp_path / to)]) == 1
    assert problem in capsys.readouterr().err


def test_keeps_the_best_epoch(tmp_path: Path) -> None:
    trainer = repeatable(tmp_path, keep=1, keep_best="loss")
    losses = trainer.fit(X, Y * [1e3], batch_size=15, epochs=5, verbose=0).history["loss"]
    best = 1 + int(np.argmin(losses))
    assert {place.epoch for place in Store(tmp_path).places()} == {best, 5}


@pytest.mark.parametrize("on_error", ["go_on", "stop"])
def test_failed_checkpoint_write_warns_or_stops(
    on_error: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer, file = repeatable(tmp_path / "folder", on_error=on_error), tmp_path / "folder" / "file"
    trainer.fit(X, Y, epochs=1, verbose=0)
    trainer.checkpoints = dataclasses.replace(trainer.checkpoints, folder=file)
    file.write_text("")
    if on_error == "stop":
        with pytest.raises(ConfigurationError, match=r"Could not write a .*Earlier .* intact"):
            trainer.fit(X, Y, epochs=2, verbose=0)
    else:
        trainer.fit(X, Y, epochs=2, verbose=0)
        assert len(trainer.model.history.epoch) == 2
        lines = capfd.readouterr().err.splitlines()
        assert ["Could not write a checkpoint" in line for line in lines] == [True, True]
        assert not any("Training continues" in line for line in lines)  # both epochs have ended
    assert len(Store(tmp_path / "folder").places()) == 1
