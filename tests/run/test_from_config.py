"""Data of recipes are checked before training, and errors in recipes keep their traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.training import build
from tfdist import Trainer, schedules, strategies
from tfdist.config import TrainConfig
from tfdist.errors import ConfigurationError, DataError
from tfdist.run import from_config
from tfdist.run.from_config import OF_RECIPES, Watched, check_spread

ROWS = (np.ones((32, 4), "float32"), np.ones((32, 1), "float32"))
DATASET = tf.data.Dataset.from_tensor_slices(ROWS)


def prepared(train: Any, validation: Any = None, **options: Any) -> tuple[Any, Any]:
    """Returns the data that `make_data` prepares, in batches of 8."""
    recipe: Any = SimpleNamespace(
        train_data=lambda config: train() if callable(train) else train,
        validation_data=lambda config: validation,
    )
    strategy = strategies.create("one_device")
    return from_config.make_data(TrainConfig(batch_size=8, **options), recipe, strategy)


@pytest.mark.parametrize(
    "data",
    [DATASET.batch(8), DATASET.batch(8, drop_remainder=True), DATASET.ragged_batch(8).repeat()],
)
def test_batches_are_accepted(data: tf.data.Dataset) -> None:
    assert prepared(data) == (data, None)
    assert prepared(data, DATASET.batch(16, drop_remainder=True))[0] is data


@pytest.mark.parametrize(
    ("data", "got"),
    [
        (None, r"got NoneType\. Return a dataset"),
        (ROWS, r"got tuple\. Return a dataset"),
        (DATASET, r"batches of 8 rows, got elements of the shapes \(4,\), \(1,\)"),
        (DATASET.map(lambda x, y: (x, y[0])), r"shapes \(4,\), \(\)\. Add .batch"),
        (DATASET.batch(4).prefetch(1), r"batches of 8 rows, got batches of 4\. Use .batch"),
        (DATASET.batch(16, drop_remainder=True), r"of 8 rows, got .* \(16, 4\), \(16, 1\)"),
    ],
)
def test_other_data_raise(data: Any, got: str) -> None:
    with pytest.raises(DataError, match=rf"train_data: expected .*{got}") as error:
        prepared(data)
    assert len(str(error.value).splitlines()) == 1


def test_unbatched_validation_data_raise() -> None:
    with pytest.raises(DataError, match="validation_data: expected a tf"):
        prepared(DATASET.batch(8), ROWS)


def test_missing_data_folder_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def read(path: Path) -> Any:
        return lambda: path.read_text()

    for data_dir in ("here", str(tmp_path / "here")):
        with pytest.raises(DataError, match=r"here/a: No such file .* folder with --data-dir"):
            prepared(read(tmp_path / "here" / "a"), data_dir=data_dir)
    with pytest.raises(DataError, match=r"b/x\.jpg: No such file .* remove it from --data"):
        prepared(read(tmp_path / "b" / "x.jpg"), data="b")  # such as a link to a deleted file
    with pytest.raises(FileNotFoundError):  # the recipe's own
        prepared(read(tmp_path / "there"), data_dir=str(tmp_path / "here"))


def rows_that_end() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    yield np.ones(4, "float32"), np.ones(1, "float32")
    raise KeyError("no more rows")


def test_error_in_a_generator_names_its_line() -> None:
    signature = (tf.TensorSpec((4,)), tf.TensorSpec((1,)))
    data = tf.data.Dataset.from_generator(rows_that_end, output_signature=signature).batch(1)
    with pytest.raises(
        DataError, match="Computing a batch failed: KeyError: 'no more rows'"
    ) as error:
        Trainer(build, "one_device").fit(data, verbose=0)
    _, *frames = str(error.value).splitlines()
    assert frames[0].startswith(f'  File "{__file__}", line ')
    assert frames[1:] == ['    raise KeyError("no more rows")']


@pytest.mark.parametrize(("batches", "steps"), [(2, 2), (5, 3), (-1, 3)])
def test_smoke_run_has_no_more_steps_than_the_data(batches: int, steps: int) -> None:
    data = tf.data.Dataset.range(1).repeat(batches)  # -1: without end
    config = TrainConfig(smoke=True)
    arguments = from_config.fit_arguments(config, data, data)
    assert (arguments["steps_per_epoch"], arguments["validation_steps"]) == (steps, steps)
    assert from_config.fit_arguments(config, data, None)["validation_steps"] is None


# ---- options without an effect ----


RECIPE: Any = SimpleNamespace(DEFAULTS={"learning_rate": 0.5})


def test_fields_that_are_read_have_an_effect() -> None:
    scaled = {"lr_scaling": "linear", "lr_reference_batch": 32}
    watched = Watched(TrainConfig(learning_rate=0.1, lr_rule="cosine", **scaled))
    schedules.learning_rate(watched.as_config(), 20)
    assert watched.unread(RECIPE) == ["jit_compile", "run_eagerly"]


def test_set_field_that_is_not_read_raises() -> None:
    watched = Watched(TrainConfig(learning_rate=0.1))
    with pytest.raises(ConfigurationError, match=r"learning_rate=0\.1 has no effect: .* 'digits'"):
        watched.unread(RECIPE)


def test_default_of_the_recipe_may_stay_unread() -> None:
    assert Watched(TrainConfig(learning_rate=0.5)).unread(RECIPE) == list(OF_RECIPES)


def test_dumping_the_configuration_reads_every_field() -> None:
    watched = Watched(TrainConfig(learning_rate=0.1))
    watched.as_config().model_dump()
    assert watched.unread(RECIPE) == []


@pytest.mark.parametrize(
    ("fields", "cure"),
    [
        ({"lr_reference_batch": 32}, "set lr_scaling: linear or sqrt"),
        ({"lr_power": 1.0, "lr_rule": "cosine"}, "set lr_rule: polynomial"),
        ({"lr_decay_epochs": [1]}, "set lr_rule: step"),
        ({"warmup_start": 0.1}, "set warmup_epochs"),
    ],
)
def test_field_without_the_field_that_it_needs_raises(fields: dict[str, Any], cure: str) -> None:
    watched = Watched(TrainConfig(learning_rate=0.5, **fields))
    schedules.learning_rate(watched.as_config(), 20)
    with pytest.raises(ConfigurationError, match=cure):
        watched.unread(RECIPE)


@pytest.mark.parametrize(
    ("flags", "num_replicas", "num_workers", "message"),
    [
        ({"sync_batch_norm": True}, 1, 1, "sync_batch_norm=True has no effect with one repl"),
        ({"watchdog_seconds": 60}, 2, 1, "watchdog_seconds=60.0 has no effect because no"),
        ({"sync_batch_norm": True, "watchdog_seconds": 60}, 2, 2, ""),
        ({"epochs": 3}, 1, 1, ""),
    ],
)
def test_distributed_options_need_several_replicas(
    flags: dict[str, Any], num_replicas: int, num_workers: int, message: str
) -> None:
    strategy: Any = SimpleNamespace(
        num_replicas=num_replicas, group=SimpleNamespace(size=num_workers)
    )
    expectation = pytest.raises(ConfigurationError, match=message) if message else nullcontext()
    with expectation:
        check_spread(TrainConfig(**flags), RECIPE, strategy)
