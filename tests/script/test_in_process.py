"""Scripts print the same numbers under `tfdist.distribute`, which leaves nothing behind."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.support.training import FIT, TOLERANCE, X, Y, build
from tfdist import cluster
from tfdist.errors import ConfigurationError
from tfdist.loops.data_handler import DataHandler
from tfdist.script import runner, tf_distribute

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(autouse=True)
def plain_keras() -> Iterator[None]:
    before = replaceable()
    yield
    tfdist.distribute(None)
    assert replaceable() == before


def replaceable() -> list[Any]:
    """Returns what a script that is distributed finds replaced."""
    methods = ["fit", "evaluate", "predict", "train_on_batch", "save", "_resolve_auto_jit_compile"]
    return [
        *(getattr(keras.Model, name) for name in methods),
        "fit" in vars(keras.Model),
        keras.distribution.set_distribution,
        *(tf.distribute.MirroredStrategy, tf.distribute.get_strategy),
    ]


def printed(name: str, folder: Path) -> list[str]:
    """Runs a script in this process, and returns its lines."""
    path, output = SCRIPTS / f"{name}.py", io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(output):
        exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__"})
    return output.getvalue().splitlines()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return printed("models", tmp_path_factory.mktemp("plain"))


@pytest.mark.xdist_group("unchanged scripts")
@pytest.mark.parametrize("strategy", ["mirrored", "sharded"])
def test_script_prints_the_numbers_of_one_device(
    strategy: str, plain: list[str], tmp_path: Path
) -> None:
    assert len(plain) == 14
    tfdist.distribute(strategy, devices=2)
    assert printed("models", tmp_path) == plain


def by_batches(after_traces: Callable[[], object] = int) -> list[Any]:
    """Trains two networks against each other batch by batch, and returns what the calls do."""
    keras.utils.set_random_seed(1)
    parts = keras.layers.Dense(6, "tanh"), keras.layers.Dropout(0.2), keras.layers.Dense(1)
    critic = keras.Sequential([keras.Input((4,)), *parts])
    critic.compile(keras.optimizers.Adam(0.01, epsilon=1e-2), "mse", metrics=["mae"])
    maker = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    both = keras.Sequential([maker, critic])
    both.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    classes = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    classes.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    values: list[Any] = [
        classes.train_on_batch(X, (Y > 0)[:, 0].astype("int32"), class_weight={1: 2.0})
    ]
    for step in range(6):
        if step == 4:
            after_traces()
        rows = 4 + 3 * (step % 2)
        x, y, noise = X[:rows], Y[:rows], np.float32(X[step : step + rows, :3])
        values.append(made := maker.predict_on_batch(noise))
        critic.layers[0].bias.assign_add(critic.layers[0].bias + 0.1)
        values += critic.train_on_batch(
            [np.concatenate([x, made])], np.concatenate([y, 0 * y]), np.arange(2 * rows) / 9.0
        )
        values.append(both.train_on_batch(noise, np.ones((rows, 1)), return_dict=True)["loss"])
        values += critic.test_on_batch(tf.constant(x), y > 0)
    return [*values, *both.get_weights()]


@pytest.mark.parametrize("strategy", ["mirrored", pytest.param("sharded", marks=pytest.mark.long)])
def test_batches_need_no_data_sets_and_no_new_traces(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[tf.Graph] = []

    def count(patch: pytest.MonkeyPatch) -> None:
        create = tf.Graph.__init__
        patch.setattr(tf.Graph, "__init__", lambda g: graphs.append(g) or create(g))

    expected = by_batches()
    for name, devices, verify in (("one_device", 1, "off"), (strategy, 2, 1)):
        tfdist.distribute(name, devices=devices, verify=verify)
        with monkeypatch.context() as patch:
            patch.setattr(DataHandler, "__init__", None)
            results = by_batches(lambda: count(patch))
        for value, other in zip(expected, results, strict=True):
            assert value == pytest.approx(other, abs=TOLERANCE)
    assert not graphs


class Noise(keras.layers.Layer):
    """Draws without a seed: the first draw takes one from Python's generator, as new layers do."""

    def call(self, rows: Any, training: bool = False) -> Any:
        return rows + 0.1 * keras.random.normal(keras.ops.shape(rows)) if training else rows


def one_after_another(*names: str) -> list[Any]:
    """Trains the same model, and a new one, under one strategy after another."""
    keras.utils.set_random_seed(1)
    numbers: list[Any] = []
    models: list[keras.Model] = []
    for name in names:
        dense, dropout = keras.layers.Dense(3, "tanh"), keras.layers.Dropout(0.2)
        models.append(keras.Sequential([keras.Input((4,)), Noise(), dense, dropout, Noise()]))
        models[-1].compile("adam", "mse", metrics=["mae"])
        if name != "keras":
            tfdist.distribute(name, devices=2, verify="off")
        # Its step is traced before the global generator exists, and once more afterwards.
        first = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        first.compile("sgd", "mse")
        numbers.append(first.train_on_batch(X, X[:, :3]))
        numbers += first.fit(X + keras.random.normal(X.shape), X[:, :3], verbose=0).history["loss"]
        for model in models:
            history = model.fit(X, X[:, :3], 5, 2, 0).history
            numbers += [*history["loss"], *history["mae"], *model.get_weights()]
        tfdist.distribute(None)
        numbers.append(np.asarray(keras.random.uniform((3,))))
    return numbers


def test_strategies_follow_each_other() -> None:
    expected = one_after_another("keras", "keras", "keras")
    results = one_after_another("mirrored", "sharded", "mirrored")
    for value, other in zip(expected, results, strict=True):
        assert value == pytest.approx(other, abs=TOLERANCE)


def test_strategies_of_tensorflow_stand_for_those_of_tfdist(tmp_path: Path) -> None:
    results = []
    for strategy, devices in (("one_device", 1), ("auto", None)):
        tfdist.distribute(strategy, devices=devices)
        results.append(printed("strategies", tmp_path))
    one, several = results
    assert one[:2] == several[:2]
    assert one[2] == "replicas 1 1"
    assert several[2:] == ["replicas 2 2", "task None", "one 1"]
    with pytest.raises(ConfigurationError, match="tfdist runs on GPUs and CPUs"):
        tf.distribute.TPUStrategy(None)
    with pytest.raises(ConfigurationError, match="move the step into train_step"):
        tf.distribute.MirroredStrategy().run(print)


def test_distribution_of_keras_is_honored() -> None:
    tfdist.distribute()
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(devices=["cpu:0", "cpu:1", "cpu:2"])
    )
    model = build()
    model.fit(**FIT)
    assert vars(model)["_tfdist_trainer"].strategy.num_replicas == 3


def test_refused_model_may_fall_back_to_one_device() -> None:
    tfdist.distribute("mirrored", devices=2, accumulate=2)
    model = build()
    model.__class__ = type("Own", (type(model),), {"train_step": lambda self, data: {"loss": 1.0}})
    with pytest.raises(ConfigurationError, match="accumulate=2"):
        model.fit(**FIT)
    tfdist.distribute("mirrored", devices=2, accumulate=2, fallback=True)
    with pytest.warns(UserWarning, match=r"fit runs on one device: accumulate=2"):
        assert len(model.fit(**FIT).history["loss"]) == 1


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("s = tf.distribute.MirroredStrategy()\ns.run(f)", "line 2: s.run(f)"),
        ("strategy.reduce('SUM', x)", "line 1: strategy.reduce('SUM', x)"),
        ("tf.distribute.get_replica_context()", "line 1"),
        ("app.run(f)\nstrategy.experimental_distribute_dataset(d)", ""),
        ("def broken(:", ""),
    ],
)
def test_custom_loops_are_recognized(text: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    assert line in tf_distribute.custom_loop(path)
    assert bool(line) == bool(tf_distribute.custom_loop(path))


def test_models_with_the_same_weights_share_an_optimizer() -> None:
    def losses() -> list[float]:
        optimizer = keras.optimizers.Adam(0.1)
        one, other = build(optimizer), build(optimizer)
        values = [one.evaluate(X, Y, verbose=0)]
        same = keras.Sequential([other, keras.layers.Rescaling(1.0)])
        same.compile(optimizer, "mae")
        values += [model.fit(**FIT).history["loss"][0] for model in (other, same, other)]
        return [*values, one.evaluate(X, Y, verbose=0), int(optimizer.iterations)]

    expected = losses()
    tfdist.distribute("mirrored", devices=2)
    assert losses() == pytest.approx(expected)


def test_missing_file_of_the_chief_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "is_chief", lambda: False)
    with pytest.raises(ValueError, match="File not found") as caught:
        runner.saying_who_writes(keras.saving.load_model)("run-081502.keras")
    assert "Only rank 0 writes" in caught.value.__notes__[0]
