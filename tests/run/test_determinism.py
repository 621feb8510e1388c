"""Deterministic runs, with data from several threads that draw random numbers."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import tensorflow as tf

from tests.support.starting import python
from tfdist import strategies
from tfdist.config import TrainConfig
from tfdist.errors import ConfigurationError, DataError
from tfdist.run import datasets, from_config, provenance

RECIPE = """
import keras, tensorflow as tf
DEFAULTS = {"epochs": 2, "batch_size": 8, "learning_rate": 0.01}
def build_model(config, steps_per_epoch):
    layers = [keras.Input((8, 8, 1)), keras.layers.Conv2D(4, 3), keras.layers.Dropout(0.3),
              keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(config.learning_rate), loss)
    return model
def one(i):
    seed = tf.stack([i, 0])
    busy = tf.reduce_sum(tf.range(tf.random.stateless_uniform([], seed, 1, 90000, tf.int32)))
    drawn = tf.random.stateless_normal([8, 8, 1], seed)
    return drawn + tf.cast(busy * 0, tf.float32), tf.cast(i % 3, tf.int32)
def train_data(config):
    rows = tf.data.Dataset.range(6).interleave(
        lambda i: tf.data.Dataset.range(10 * i, 10 * i + 8).map(one, 4, deterministic=False),
        cycle_length=3, num_parallel_calls=3, deterministic=False)
    return rows.shuffle(16).batch(config.batch_size, drop_remainder=True)
def validation_data(config):
    return None
"""


def test_two_runs_are_bitwise_identical(tmp_path: Path) -> None:
    recipe = tmp_path / "drawn.py"
    recipe.write_text(RECIPE)
    program = (
        "import sys; from tfdist import train; from tfdist.run import flags\n"
        "config = flags.parse('', '', sys.argv[1:]); train.train(config)\n"
        "import keras, hashlib; model = keras.models.load_model(config.run_dir + '/model.keras')\n"
        "print(hashlib.sha256(b''.join(w.tobytes() for w in model.get_weights())).hexdigest())"
    )
    flags = ["--recipe", str(recipe), "--strategy", "mirrored", "--verbose", "0", "--deterministic"]
    flags += ["--log-every", "1"]
    with ThreadPoolExecutor(2) as pool:  # at the same time
        outputs = pool.map(
            lambda name: python("-c", program, *flags, "--run-dir", str(tmp_path / name)).stdout,
            "ab",
        )
    assert len({output.split()[-1] for output in outputs}) == 1
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").open()]
        for name in "ab"
    ]
    assert losses[0] == losses[1]
    versions = json.loads((tmp_path / "a" / "versions.json").read_text())
    assert (versions["seed"], versions["deterministic"], versions["replicas"]) == (0, True, 2)
    assert versions["devices"] == ["CPU:0", "CPU:1"]
    assert versions["git"]["recipe"] is None


def test_stateful_random_numbers_in_the_data_raise() -> None:
    def draw(number: tf.Tensor) -> tf.Tensor:
        return tf.random.normal([])

    data = tf.data.Dataset.range(3).interleave(lambda i: tf.data.Dataset.range(i).map(draw))
    with pytest.raises(DataError, match="train_data uses RandomStandardNormal"):
        datasets.check_repeatable(data, "train_data")
    datasets.check_repeatable(tf.data.Dataset.range(9).shuffle(3).batch(2), "train_data")


def test_asynchronous_strategy_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = SimpleNamespace(name="parameter_server")
    monkeypatch.setattr(strategies, "create", lambda *args, **options: strategy)
    monkeypatch.setattr(tf.config.experimental, "enable_op_determinism", lambda: None)
    with pytest.raises(
        ConfigurationError, match="workers of parameter_server apply their updates in an"
    ):
        from_config.make_strategy(TrainConfig(deterministic=True))


def test_git_state_reports_changes(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "a.py").write_text("")
    git("init", "-b", "trunk")
    git("add", ".")
    git("commit", "-m", "first")
    state = provenance.git_state(tmp_path)
    assert state
    assert (len(state["commit"]), state["branch"], state["changed"]) == (40, "trunk", False)
    (tmp_path / "a.py").write_text("pass")
    assert provenance.git_state(tmp_path) == state | {"changed": True}
    assert provenance.git_state(tmp_path / "not there") is None
