"""Which modules are recipes, and the number of steps of their data, which flags limit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.config import TrainConfig
from tfdist.errors import ConfigurationError, DataError
from tfdist.run import from_config, recipe
from tfdist.run.datasets import limited

NAME = "test_recipes.one"
#: Five batches, the last one partial, in a new order on each pass.
DATA = tf.data.Dataset.range(18).shuffle(18, seed=1).batch(4)
VALIDATION = tf.data.Dataset.range(40).batch(4)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType(NAME)
    members: dict[str, Any] = {
        "DEFAULTS": {},
        "train_data": lambda config: None,
        "validation_data": lambda config: None,
        "build_model": lambda config, steps_per_epoch: None,
    }
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, "test_recipes", ModuleType("test_recipes"))
    monkeypatch.setitem(sys.modules, NAME, module)
    return module


def test_recipe_is_found(module: ModuleType) -> None:
    assert recipe.find(NAME) is module


@pytest.mark.parametrize("member", ["DEFAULTS", "train_data", "validation_data", "build_model"])
def test_missing_member_raises(module: ModuleType, member: str) -> None:
    delattr(module, member)
    with pytest.raises(ConfigurationError, match=f"is not a recipe: it lacks {member}"):
        recipe.find(NAME)


FILE = """
import beside
DEFAULTS = {}
def train_data(config): ...
def validation_data(config): ...
def build_model(config, steps_per_epoch): return beside.NUMBER
"""


@pytest.mark.parametrize("name", ["a_workload_of_mine", "json"])  # also an installed module's
def test_file_is_a_recipe(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    (tmp_path / f"{name}.py").write_text(FILE)
    (tmp_path / "beside.py").write_text("NUMBER = 3")
    result = recipe.find(f"./{name}.py")
    assert result.build_model(TrainConfig(), None) == 3
    assert recipe.find(f"./{name}.py") is result
    with pytest.raises(ConfigurationError, match="expected a Python file"):
        recipe.find("not_there.py")


def of_config_alone(config: object) -> None: ...


def with_more(config: object, steps_per_epoch: int, width: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (of_config_alone, r"got def build_model\(config: 'object'\)"),
        (with_more, r"width: 'int'\)"),
        ("cnn", "got 'cnn'"),
    ],
)
def test_wrong_signature_raises(
    module: ModuleType, function: Callable[..., None] | str, message: str
) -> None:
    vars(module)["build_model"] = function
    with pytest.raises(ConfigurationError, match=message) as error:
        recipe.find(NAME)
    assert "expected def build_model(config, steps_per_epoch)" in str(error.value)
    assert "change its parameters" in str(error.value)


def test_names_of_parameters_are_free(module: ModuleType) -> None:
    vars(module)["build_model"] = lambda options, steps, width=3: None
    assert recipe.find(NAME) is module


def test_number_of_steps_of_data() -> None:
    data = tf.data.Dataset.range(100)
    assert recipe.num_steps(data.batch(64)) == 2
    assert recipe.num_steps(data.filter(lambda row: row > 3).batch(64)) is None
    assert recipe.num_steps(data.repeat().batch(64)) is None


def test_callbacks_come_from_recipe_and_flags(module: ModuleType) -> None:
    own = keras.callbacks.TerminateOnNaN()
    vars(module)["callbacks"] = lambda config: [own]
    config = TrainConfig(early_stopping="val_loss:5")
    first, stopping = from_config.make_callbacks(config, recipe.find(NAME))
    assert first is own
    assert isinstance(stopping, keras.callbacks.EarlyStopping)
    assert (stopping.monitor, stopping.patience) == ("val_loss", 5)


def test_invalid_optional_members_raise(module: ModuleType) -> None:
    vars(module)["callbacks"] = lambda: []
    with pytest.raises(ConfigurationError, match=r"expected def callbacks\(config\), got"):
        recipe.find(NAME)
    vars(module)["Hyperparameters"] = {"depth": 3}
    with pytest.raises(ConfigurationError, match=r"expected class Hyperparameters\(pydantic"):
        recipe.find(NAME)


def rows(data: tf.data.Dataset) -> list[list[int]]:
    return [batch.tolist() for batch in data.as_numpy_iterator()]


def test_all_batches_by_default() -> None:
    assert limited(TrainConfig(), DATA, None) == (DATA, None)


def test_limit_steps_takes_the_first_batches_of_each_pass() -> None:
    data, validation = limited(TrainConfig(limit_steps=2), DATA, VALIDATION)
    assert int(data.cardinality()) == 2
    first, second = rows(data), rows(data)
    assert first != second  # reshuffled
    assert rows(validation) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert limited(TrainConfig(limit_steps=9), DATA, None)[1] is None
    assert int(limited(TrainConfig(limit_steps=9), DATA, None)[0].cardinality()) == 5


def test_overfit_batches_are_the_same_in_training_and_validation() -> None:
    data, validation = limited(TrainConfig(overfit_batches=5), DATA, VALIDATION)
    assert data is validation
    first = rows(data)
    assert sorted(np.concatenate(first)) == list(range(18))
    assert [len(batch) for batch in first] == [4, 4, 4, 4, 2]
    assert rows(data.take(2)) == first[:2]
    assert rows(data) == first
    assert int(data.cardinality()) == 5


def test_too_few_batches_to_overfit_raise() -> None:
    with pytest.raises(DataError, match=r"overfit_batches=6: .* got 5: choose a smaller"):
        limited(TrainConfig(overfit_batches=6), DATA, None)
