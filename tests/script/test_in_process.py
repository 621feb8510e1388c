"""Scripts print the same numbers under `tfdist.distribute`, which leaves nothing behind."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

import tfdist
from tests.support.training import FIT, X, Y, build
from tfdist.errors import ConfigurationError
from tfdist.script import tf_distribute

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
