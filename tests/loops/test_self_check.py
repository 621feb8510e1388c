"""The first step's check: what it finds, what it leaves unchanged, and when it runs."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tfdist import Trainer
from tfdist.errors import ConfigurationError, VerificationError
from tfdist.strategies import mirrored_variables
from tfdist.strategies.mirrored import Mirrored

X = np.random.default_rng(0).normal(size=(26, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


def build(middle: type = layers.Identity, **options: Any) -> keras.Model:
    """Returns a model whose first bias has a gradient of rounding errors, which Adam enlarges."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,))
    hidden = layers.BatchNormalization()(layers.Dense(3)(inputs))
    model = keras.Model(inputs, layers.Dense(1)(middle()(hidden)))
    model.compile(keras.optimizers.Adam(0.01), "mse", **options)
    return model


def dropping(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(1)  # with one model in ten, rounding explains `Rounded`
    model = keras.Sequential([keras.Input((4,)), layers.Dropout(0.5), layers.Dense(1)])
    model.compile("sgd", "mse", **options)
    return model


class ByCount(Mirrored):
    """Averages the replicas' sums as if all had the same number of rows."""

    def all_reduce(self, tensors: list) -> list:
        return [total / self.num_replicas for total in super().all_reduce(tensors)]


class Rounded(Mirrored):
    """Rounds gradients as TensorFloat-32 rounds the factors of a product, to 10 bits."""

    def all_reduce(self, tensors: list) -> list:
        sums = super().all_reduce(tensors)
        return [tf.cast(tf.cast(total, tf.float16), total.dtype) for total in sums]


class Drifting(Mirrored):
    """Changes the weights of one replica in each step."""

    weight: Any = None

    def update(self, fn: Any, results: Any) -> list[Any]:
        done = super().update(fn, results)
        for copy in mirrored_variables.copies_of(self.weight.value).values():
            copy.assign(copy + 1e-3)  # more than rounding, which is not reported
        return done


class Counting(layers.Layer):
    """Draws numbers and counts its calls in all the ways that a script may use."""

    calls: list[int]
    random: np.random.Generator
    steps = 0

    def call(self, x: Any) -> Any:
        self.steps += 1
        self.calls.append(self.steps)
        return x * (0.5 + np.random.random() + self.random.random())


class Noise(layers.Layer):
    """Draws numbers that plain Keras draws anew when it runs eagerly."""

    def call(self, x: Any) -> Any:
        return x + tf.random.normal(tf.shape(x))


class Median(keras.metrics.Metric):
    """Keeps its values in a list, and begins another one for each epoch."""

    def __init__(self) -> None:
        super().__init__(name="m")
        self.values: list[float] = []

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.values.append(float(tf.reduce_sum(y_true - y_pred)))

    def result(self) -> float:
        return float(np.median(self.values or [0.0]))

    def reset_state(self) -> None:
        self.values = []


class SeededNoise(layers.Layer):
    """Draws the same numbers as plain Keras, one after the other."""

    def call(self, x: Any) -> Any:
        return x + tf.random.normal(tf.shape(x), seed=5)


@pytest.mark.parametrize(
    ("strategy", "value"), [(ByCount, "model variable"), (Drifting, "the copy of dense")]
)
def test_wrong_strategy_is_detected(strategy: type[Mirrored], value: str) -> None:
    trainer = Trainer(build, strategy(["CPU:0", "CPU:1"]), sync_batch_norm=True, verify="first")
    setattr(trainer.strategy, "weight", trainer.model.weights[0])  # noqa: B010
    before = trainer.model.get_weights()
    with pytest.raises(VerificationError, match=f"differ from plain Keras on one device: {value}"):
        trainer.fit(X, Y, batch_size=13, verbose=0)
    for weight, value_before in zip(trainer.model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, value_before)


def test_tensor_float_32_rounds_as_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its products differ by the number of rows, so that replicas differ from one device."""

    def line() -> str:
        trainer = Trainer(dropping, Rounded(["CPU:0", "CPU:1"]), verify="off")
        return trainer.verify(X, Y, steps=1, batch_size=13).splitlines()[0]

    with pytest.raises(VerificationError, match="differ from plain Keras"):
        line()
    monkeypatch.setattr("tfdist.devices.rounds_float32", lambda: True)
    assert line().startswith("verified: 1 train steps match")


def test_right_strategy_passes() -> None:
    """Moments per replica are compared on the same rows; Adam enlarges the rounding of a bias."""
    trainer = Trainer(build, "mirrored", devices=2, verify="off", log_every=2)
    lines = trainer.verify(X, Y, steps=2, batch_size=13).splitlines()
    assert [line.partition(" match")[0] for line in lines] == [
        f"verified: 2 {loop} steps" for loop in ("train", "test", "predict")
    ]


@pytest.mark.parametrize("strategy", [Mirrored, ByCount])
def test_images_of_bytes(strategy: type[Mirrored]) -> None:
    """Their sums over pixels cancel before BatchNorm; rounding moves values over a ReLU's kink."""

    def network() -> keras.Model:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((48, 48, 3))])
        for _ in range(2):
            for layer in (layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU()):
                model.add(layer)
        model.add(layers.GlobalAveragePooling2D())
        model.compile("adam", "mse")
        return model

    images = np.random.default_rng(1).integers(0, 256, (5, 48, 48, 3)).astype("float32")
    trainer = Trainer(network, strategy(["CPU:0", "CPU:1"]), sync_batch_norm=True, verify=1)
    is_wrong = strategy is ByCount
    with pytest.raises(VerificationError) if is_wrong else contextlib.nullcontext():
        trainer.fit(images, np.eye(5, 4), batch_size=5, verbose=0)


@pytest.mark.parametrize("strategy", [Mirrored, ByCount])
def test_xla_may_draw_other_numbers_than_eager_steps(strategy: type[Mirrored]) -> None:
    """On a GPU, XLA is the default of a model without convolutions."""

    trainer = Trainer(
        functools.partial(dropping, jit_compile=True), strategy(["CPU:0", "CPU:1"]), verify="off"
    )
    if strategy is ByCount:
        with pytest.raises(VerificationError, match="plain Keras on one device: model variable"):
            trainer.verify(X, Y, steps=2, batch_size=13)
    else:
        line, *_ = trainer.verify(X, Y, steps=2, batch_size=13).splitlines()
        assert line.startswith("verified: 2 train steps match plain Keras on one device (")


def test_leaves_no_trace() -> None:
    """Weights, random numbers, attributes and lists are as without the check."""
    results = []
    for verify in ("off", 2):
        np.random.seed(3)
        calls: list[int] = []
        Counting.calls, Counting.random = calls, np.random.default_rng(5)
        make = functools.partial(build, Counting, run_eagerly=True, metrics=[Median()])
        trainer = Trainer(make, "one_device", verify=verify)
        calls.clear()  # what building the step ran
        history = trainer.fit(X, Y, batch_size=13, epochs=2, shuffle=False, verbose=0).history
        steps = trainer.model.layers[3].steps
        results.append((history["loss"], history["m"], len(calls), steps, np.random.random()))
    assert results[0] == results[1]


def test_eager_losses_run_as_often_as_in_keras() -> None:
    def make() -> keras.Model:
        calls: list[int] = []

        def loss(y_true: Any, y_pred: Any) -> Any:
            nonlocal calls
            calls = [*calls, 1]
            return len(calls) * keras.ops.abs(y_true - y_pred)

        model = keras.Sequential([keras.Input((4,)), layers.Dense(1, kernel_initializer="ones")])
        model.compile("sgd", loss, run_eagerly=True)
        return model

    fit: dict[str, Any] = {"batch_size": 13, "epochs": 2, "shuffle": False, "verbose": 0}
    wanted = make().fit(X, Y + 1, **fit).history["loss"]
    for verify in ("off", 2):
        history = Trainer(make, "one_device", verify=verify).fit(X, Y + 1, **fit).history
        np.testing.assert_allclose(history["loss"], wanted, 1e-6)


def test_seeded_operations_begin_their_sequences_anew() -> None:
    """Each keeps the state of its sequence in a kernel, which is no variable."""

    def make() -> keras.Model:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), SeededNoise(), layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    fit: dict[str, Any] = {"batch_size": 13, "epochs": 2, "shuffle": False, "verbose": 0}
    wanted = make().fit(X, Y, **fit).history["loss"]
    trainer = Trainer(make, "one_device", verify=2)
    assert trainer.fit(X, Y, **fit).history["loss"] == wanted


def test_summaries_are_written_once_per_step(tmp_path: Path) -> None:
    """By one replica for the full batch, and neither by a trial nor by the check."""
    writer = tf.summary.create_file_writer(str(tmp_path))

    class Writing(keras.Model):
        def train_step(self, data: Any) -> Any:
            logs = super().train_step(data)
            with writer.as_default():
                tf.summary.scalar("loss", logs["loss"], step=self.optimizer.iterations)
            return logs

    def make() -> keras.Model:
        inputs = keras.Input((4,))
        model = Writing(inputs, layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
        return model

    trainer = Trainer(make, "mirrored", devices=2, verify=2)
    with pytest.warns(match="calls Python, or reads or writes data"):
        loss = trainer.fit(X, Y, batch_size=13, verbose=0).history["loss"]
    assert trainer.describe()["verified"].startswith("not verified: a step uses")
    (path,) = tmp_path.iterdir()
    events = [(e.step, e.summary.value) for e in tf.compat.v1.train.summary_iterator(str(path))]
    written = [(step, tf.make_ndarray(v.tensor)) for step, values in events for v in values]
    assert [step for step, _ in written] == [1, 2]
    assert written[-1][1] == pytest.approx(loss[0])


@pytest.mark.parametrize("verify", ["off", 2])
def test_recurrent_states_continue_as_in_keras(verify: Any, tmp_path: Path) -> None:
    """Also after the check, and after an interrupt."""

    def make() -> keras.Model:
        keras.utils.set_random_seed(0)
        lstm = layers.Bidirectional(layers.LSTM(2, stateful=True))
        model = keras.Sequential([keras.Input(batch_shape=(2, 2, 2)), lstm, layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    def stop(batch: int, logs: Any) -> None:
        if batch == 8:
            raise KeyboardInterrupt

    fit: dict[str, Any] = {"batch_size": 2, "epochs": 2, "shuffle": False, "verbose": 0}
    data = X.reshape(-1, 2, 2), Y
    wanted = make().fit(*data, **fit).history["loss"]

    def trainer() -> Trainer:
        checkpoints = tfdist.Checkpoints(tmp_path)
        return Trainer(make, "mirrored", devices=2, verify=verify, checkpoints=checkpoints)

    interrupt = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
    with pytest.raises(KeyboardInterrupt):
        trainer().fit(*data, callbacks=[interrupt], **fit)
    np.testing.assert_allclose(trainer().fit(*data, **fit).history["loss"], wanted, 1e-6)


def test_runs_by_default_for_code_of_the_user(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TFDIST_VERIFY", raising=False)
    match = "verified: 2 train steps match plain Keras on one device"
    cases: dict[type, str] = {
        layers.Identity: "not necessary", Counting: f"{match} (", Noise: f"{match}, except"
    }  # fmt: skip
    warned = "A step changes Counting.steps and draws from NumPy or random while it is traced"
    for kind, status in cases.items():
        Counting.calls, Counting.random = [], np.random.default_rng(5)
        trainer = Trainer(functools.partial(build, kind), "one_device")
        with pytest.warns(match=warned) if kind is Counting else contextlib.nullcontext():
            trainer.fit(X, Y, batch_size=13, verbose=2)
        assert trainer.describe()["verified"].startswith(status)
        assert ("verified: 2" in capsys.readouterr().out) is (kind is not layers.Identity)


def test_invalid_mode() -> None:
    with pytest.raises(ConfigurationError, match="expected 'off', 'first', or a number of steps"):
        Trainer(build, verify="always")  # type: ignore[arg-type]
