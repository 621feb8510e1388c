"""Finding a recipe by its name; what a recipe is.

A recipe is a module with the four members of `Recipe`: its own defaults for the configuration, and
three functions that take the resolved configuration.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any, Protocol, cast

from tfdist.config import TrainConfig
from tfdist.errors import ConfigurationError

_PACKAGE = "recipes"


class Recipe(Protocol):
    """What the training command asks of a recipe module."""

    DEFAULTS: Mapping[str, Any]  #: fields of TrainConfig that this workload sets otherwise

    def build_model(self, config: TrainConfig) -> Any:
        """Returns a compiled `keras.Model`; called inside the strategy's scope."""

    def train_data(self, config: TrainConfig) -> Any:
        """Returns a `tf.data.Dataset` of global batches for one epoch."""

    def validation_data(self, config: TrainConfig) -> Any:
        """Returns a `tf.data.Dataset` of global batches for validation."""


_MEMBERS = ("DEFAULTS", "build_model", "train_data", "validation_data")


def names() -> list[str]:
    """The names of the recipes that came with tfdist, without importing any."""
    package = importlib.import_module(_PACKAGE)
    found = (module.name for module in pkgutil.iter_modules(package.__path__))
    return sorted(name for name in found if not name.startswith("_"))


def find(name: str) -> Recipe:
    """Imports the recipe called `name`.

    Args:
        name: a module of the package `recipes`, or, with a dot in it, any importable module.

    Raises:
        ConfigurationError: no such recipe, or the module lacks a member of `Recipe`.
    """
    path = name if "." in name else f"{_PACKAGE}.{name}"
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise  # the recipe is there, and what it imports is not
        raise ConfigurationError(
            f"No recipe is called {name!r}; choose one of {', '.join(names())}, "
            "or give the dotted name of a module."
        ) from None
    if missing := [member for member in _MEMBERS if not hasattr(module, member)]:
        raise ConfigurationError(
            f"{path} is no recipe: it lacks {', '.join(missing)} (see tfdist.run.recipe.Recipe)."
        )
    return cast(Recipe, module)
