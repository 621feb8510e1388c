"""Finds a recipe by its name, and defines what a recipe is.

A recipe is a module with the four members of `Recipe`: its own defaults for the configuration, and
three functions that take the resolved configuration. It may have more:

- `Hyperparameters`, a `pydantic.BaseModel` with the recipe's own hyperparameters. It validates
  `--set depth=34`, and `Hyperparameters.model_validate(config.set)` returns the values. If the
  defaults of a recipe include a `model`, users can choose it: `models.image_classifier` builds the
  model that `config.model` names, whose arguments can be set likewise.
- `callbacks(config)`, which returns Keras callbacks for the training, the same on every worker.
- `report(config, model, folder)`, which writes pictures of the trained model into the run folder
  and returns their names. Called on the chief with the saved model, loaded by plain Keras.
- `prepare(config, model)`, which compiles a saved model for the recipe's data, if Keras loads it
  otherwise.
- `SMOKE`, overrides of fields that make the run small, for `--smoke`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

from pydantic import BaseModel, create_model

from tfdist import models
from tfdist.config import TrainConfig
from tfdist.console import tables
from tfdist.console.settings_file import HYPERPARAMETER_PREFIX, Layer, Setting
from tfdist.errors import ConfigurationError, did_you_mean

PACKAGE = "recipes"
_TEMPLATE = f"{PACKAGE}._template"

#: Maximum fraction of a short run for a recipe's default warm-up.
_MAX_WARMUP = 0.25
_SMOKE_BATCH = 32  # rows, for a recipe without SMOKE


class Recipe(Protocol):
    """The members of a recipe module.

    `train_data` is called before `build_model`, which gets the length of an epoch. Arguments are
    positional.
    """

    DEFAULTS: Mapping[str, Any]  #: this recipe's defaults for fields of TrainConfig

    def train_data(self, config: TrainConfig) -> Any:
        """Returns a `tf.data.Dataset` of global batches for one epoch.

        If `tf.data` cannot infer the number of batches, set it with
        `tf.data.experimental.assert_cardinality`.
        """

    def validation_data(self, config: TrainConfig) -> Any:
        """Returns a `tf.data.Dataset` of batches for validation; None: there is none."""

    def build_model(self, config: TrainConfig, steps_per_epoch: int | None) -> Any:
        """Returns a compiled `keras.Model`; called inside the strategy's scope.

        Args:
            config: The resolved configuration.
            steps_per_epoch: The number of global batches of `train_data`, for learning rate
                schedules; None if unknown. `schedules.learning_rate` accepts both.
        """


_FUNCTIONS = ("train_data", "validation_data", "build_model")


def names() -> list[str]:
    """Returns the names of the recipes that come with tfdist, without importing them."""
    package = importlib.import_module(PACKAGE)
    names = (module.name for module in pkgutil.iter_modules(package.__path__))
    return sorted(name for name in names if not name.startswith("_"))


def print_table() -> None:
    """Prints the recipes that come with tfdist, with the first line of their docstrings."""
    tables.facts((name, first_line(name)) for name in names())


def first_line(name: str) -> str:
    """Returns the first line of a recipe's docstring."""
    text = ast.get_docstring(ast.parse(_source(f"{PACKAGE}.{name}")))
    return (text or "").partition("\n")[0]


def write_new(file: str) -> None:
    """Writes a working recipe as a starting point.

    Raises:
        ConfigurationError: The file exists, or cannot be written.
    """
    path = Path(file)
    if path.suffix != ".py":
        raise ConfigurationError(f"--new-recipe {file}: expected a name that ends in .py.")
    try:
        with path.open("x") as opened:
            opened.write(_source(_TEMPLATE).replace("recipes/_template.py", file))
    except FileExistsError:
        raise ConfigurationError(f"--new-recipe {file}: the file already exists.") from None
    except OSError as error:
        raise ConfigurationError(f"--new-recipe {file}: {error.strerror}.") from None
    given = file if "/" in file else f"./{file}"
    print(f"Wrote {file}. Train it with\n    python -m tfdist.train --recipe {given}")


def find(name: str) -> Recipe:
    """Imports the recipe called `name`.

    Args:
        name: a module of the package `recipes`; the path of a Python file, `./mine.py`; or, with a
            dot in it, any importable module.

    Raises:
        ConfigurationError: There is no such recipe, or the module lacks a member of `Recipe`, or
            has one that cannot be called as it is there.
    """
    path = name if "." in name else f"{PACKAGE}.{name}"
    try:
        if name.endswith(".py"):
            module = module_of_file(Path(name))
        else:
            module = importlib.import_module(path)
    except (ImportError, ValueError) as error:
        missing = getattr(error, "name", None)
        if missing is None or not f"{path}.".startswith(f"{missing}."):
            importlib.import_module("tfdist.upstream")  # if it is Keras, an error with the fix
            raise  # the recipe exists, but fails
        raise ConfigurationError(
            f"There is no recipe {name!r}. Choose one of {', '.join(names())}, "
            "or pass the path of a Python file or the dotted name of a module."
            f"{did_you_mean(name, names())}"
        ) from None
    _check(module)
    return cast(Recipe, module)


def module_of_file(path: Path) -> ModuleType:
    """Runs a file as a module of its name; it finds modules of its folder, as a script does."""
    path, name = path.resolve(), path.stem
    known = importlib.util.find_spec(name)
    if known and known.origin != str(path):
        name = f"recipe_{name}"  # another module has this name
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigurationError(
            f"{path} does not exist: expected a Python file or a recipe's name."
        )
    if name not in sys.modules:
        sys.path.append(str(path.parent))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class NoHyperparameters(BaseModel):
    """Hyperparameters of a recipe that defines none."""


def hyperparameters(recipe: Recipe, model: str | None) -> type[BaseModel]:
    """Returns a class with the recipe's hyperparameters and the arguments of the chosen model."""
    own = getattr(recipe, "Hyperparameters", NoHyperparameters)
    if model is None:
        return own
    of_model = {k: v for k, v in models.options(model).items() if k not in own.model_fields}
    fields: dict[str, Any] = of_model
    return create_model(own.__name__, __base__=own, **fields)


def callbacks(recipe: Recipe, config: TrainConfig) -> list[Any]:
    """Returns the recipe's `keras.callbacks.Callback`s."""
    make = getattr(recipe, "callbacks", None)
    return list(make(config) or ()) if make else []


def prepare(recipe: Recipe, config: TrainConfig, model: Any) -> None:
    """Calls the recipe's `prepare` function with a loaded model, if it has one."""
    make = getattr(recipe, "prepare", None)
    if make:
        make(config, model)


def report(recipe: Recipe, config: TrainConfig, model: Any, folder: Path) -> list[str]:
    """Calls the recipe's `report` function with a trained model, if it has one.

    Returns:
        The names of the files that were written.
    """
    write = getattr(recipe, "report", None)
    return list(write(config, model, folder) or ()) if write else []


def defaults(recipe: Recipe, given: TrainConfig) -> Layer:
    """Returns the recipe's defaults; its `set` is omitted if the user chose another model."""
    defaults = dict(recipe.DEFAULTS)
    if given.model and given.model != defaults.get("model"):
        defaults.pop("set", None)
    if "epochs" in given.model_fields_set:
        defaults |= _fitting_schedule(defaults, given.epochs)
    return {
        field: Setting(value, f"recipe {given.recipe!r}, DEFAULTS: {field}")
        for field, value in defaults.items()
    }


def _fitting_schedule(own: Mapping[str, Any], epochs: int) -> dict[str, Any]:
    """Returns the warm-up and the decay epochs of a recipe, shortened if the run is too short.

    They keep their parts of the run if the warm-up would be more than `_MAX_WARMUP` of it, or the
    rate would never fall for the last time.
    """
    usual = own.get("epochs", TrainConfig.model_fields["epochs"].default)
    warmup, decays = own.get("warmup_epochs", 0), own.get("lr_decay_epochs") or []
    fits = warmup <= _MAX_WARMUP * epochs and max(decays, default=0) < epochs
    if fits or epochs >= usual:
        return {}
    shorter = {"warmup_epochs": round(warmup * epochs / usual, 4)} if warmup else {}
    if decays:
        shorter["lr_decay_epochs"] = [round(epoch * epochs / usual, 4) for epoch in decays]
    return shorter


def smoke(recipe: Recipe, given: TrainConfig) -> Layer:
    """Returns the fields for a smoke run of a recipe. Flags and files override them."""
    smaller = dict(_smoke_fields(recipe))
    fields = getattr(recipe, "Hyperparameters", NoHyperparameters).model_fields
    settings = smaller.pop("set", {})
    model = smaller.get("model", recipe.DEFAULTS.get("model"))
    if given.model and given.model != model:  # the settings are those of another network
        smaller.pop("model", None)
        settings = {name: value for name, value in settings.items() if name in fields}
    smaller |= {f"{HYPERPARAMETER_PREFIX}{name}": value for name, value in settings.items()}
    return {
        field: Setting(value, f"recipe {given.recipe!r}, SMOKE: {field}")
        for field, value in smaller.items()
    }


def made_smaller(recipe: Recipe, config: TrainConfig) -> dict[str, Any]:
    """Returns the fields and hyperparameters that have their values because of `--smoke`."""
    smaller = dict(_smoke_fields(recipe))
    settings = smaller.pop("set", {})
    fields = {k: v for k, v in smaller.items() if getattr(config, k) == v}
    usual = recipe.DEFAULTS.get("set", {})
    return fields | {
        k: v for k, v in settings.items() if config.set.get(k) == v and usual.get(k) != v
    }


def _smoke_fields(recipe: Recipe) -> Mapping[str, Any]:
    batch_size = recipe.DEFAULTS.get("batch_size", TrainConfig.model_fields["batch_size"].default)
    usual = {"batch_size": _SMOKE_BATCH} if batch_size > _SMOKE_BATCH else {}
    return getattr(recipe, "SMOKE", usual)


def num_steps(data: Any) -> int | None:
    """Returns the number of batches of a `tf.data.Dataset`; None if unknown or infinite."""
    steps = int(data.cardinality())
    return steps if steps >= 0 else None


def _check(module: ModuleType) -> None:
    """Checks that a module is a recipe."""
    members = ("DEFAULTS", *_FUNCTIONS)
    if missing := [member for member in members if not hasattr(module, member)]:
        raise ConfigurationError(
            f"{module.__name__} is not a recipe: it lacks {', '.join(missing)} "
            "(see tfdist.run.recipe.Recipe)."
        )
    if not isinstance(module.DEFAULTS, Mapping):
        raise ConfigurationError(
            f"{module.__name__}: expected DEFAULTS like {{'epochs': 3}}, got {module.DEFAULTS!r}."
        )
    kind = getattr(module, "Hyperparameters", BaseModel)
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        raise ConfigurationError(
            f"{module.__name__}: expected class Hyperparameters(pydantic.BaseModel), got {kind!r}."
        )
    expected = {
        name: list(inspect.signature(getattr(Recipe, name)).parameters)[1:] for name in _FUNCTIONS
    }
    if hasattr(module, "callbacks"):
        expected["callbacks"] = ["config"]
    if hasattr(module, "prepare"):
        expected["prepare"] = ["config", "model"]
    if hasattr(module, "report"):
        expected["report"] = ["config", "model", "folder"]
    for name, arguments in expected.items():
        function = getattr(module, name)
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError:
            actual = (
                f"def {name}{inspect.signature(function)}" if callable(function) else repr(function)
            )
            raise ConfigurationError(
                f"{module.__name__}: expected def {name}({', '.join(arguments)}), got {actual}: "
                "change its parameters (see tfdist.run.recipe.Recipe)."
            ) from None


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ConfigurationError(f"{module} is missing. Reinstall tfdist.")
    return Path(spec.origin).read_text("utf-8")
