"""Builds the configuration from values of fields, and reports the first invalid value."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from tfdist.config import TrainConfig
from tfdist.console.settings_file import OWN, Layer, Setting
from tfdist.errors import ConfigurationError, did_you_mean

Model = TypeVar("Model", bound=BaseModel)


def resolve(layers: Sequence[Layer]) -> TrainConfig:
    """Returns the configuration from layers of fields; later layers override earlier ones.

    Raises:
        ConfigurationError: There is no such field, or a value is invalid; the message names its
            flag or line.
    """
    settings = {name: setting for layer in layers for name, setting in layer.items()}
    own = {name: settings.pop(name) for name in list(settings) if name.startswith(OWN)}
    values = checked(TrainConfig, settings, "field")
    given = {name.removeprefix(OWN): setting.value for name, setting in own.items()}
    return values.model_copy(update={"set": values.set | given})


def with_hyperparameters(
    config: TrainConfig, layers: Sequence[Layer], model: type[BaseModel]
) -> TrainConfig:
    """Returns a configuration whose `set` is checked and complete.

    Args:
        config: The configuration from these layers.
        layers: As for `resolve`.
        model: The class of the recipe's hyperparameters.

    Raises:
        ConfigurationError: There is no such hyperparameter, or a value is invalid.
    """
    places = {name: setting.place for layer in layers for name, setting in layer.items()}
    own = {
        name: Setting(value, places.get(f"{OWN}{name}", f"{OWN}{name}"))
        for name, value in config.set.items()
    }
    made = checked(model, own, f"hyperparameter of recipe {config.recipe!r}")
    return config.model_copy(update={"set": made.model_dump(mode="json")})


def checked(model: type[Model], settings: Layer, what: str) -> Model:
    """Returns an instance of a model from values of its fields.

    Args:
        model: The class.
        settings: Values by field.
        what: What a field is called in messages.

    Raises:
        ConfigurationError: There is no such field, or a value is invalid; the message names its
            flag or line.
    """
    for name, setting in settings.items():
        if name not in model.model_fields:
            hint = did_you_mean(name, model.model_fields)
            raise ConfigurationError(f"{setting.place}: there is no such {what}.{hint}")
    try:
        return model(**{name: setting.value for name, setting in settings.items()})
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        place = settings[name].place if name in settings else name
        raise ConfigurationError(f"{place}: {mistake(error)}") from None


def mistake(error: ValidationError) -> str:
    """Returns the problem of the first invalid field: expected and actual value, on one line."""
    first, *_ = details = error.errors()
    of_field = [detail["msg"] for detail in details if detail["loc"][0] == first["loc"][0]]
    if first["type"] == "value_error":
        return first["msg"].removeprefix("Value error, ")
    takes = [text.removeprefix("Input should be ").split(", unable")[0] for text in of_field]
    got = first["input"]
    hint = did_you_mean(got, re.findall(r"'([^']+)'", " ".join(takes)))
    return f"expected {' or '.join(takes)}, got {got!r}.{hint}"


def own_from_flags(words: Sequence[str]) -> dict[str, Setting]:
    """Returns the hyperparameters of flags such as `--set depth=34`; lists are YAML.

    Raises:
        ConfigurationError: A flag has another form.
    """
    found: dict[str, Setting] = {}
    for word in words:
        name, is_one, text = word.partition("=")
        if not is_one:
            raise ConfigurationError(f"--set {word}: expected NAME=VALUE.")
        value = text if text[:1] not in ("[", "{") else _yaml(text, f"--set {name}")
        found[f"{OWN}{name}"] = Setting(value, f"--set {name}")
    return found


def _yaml(text: str, place: str) -> Any:
    """Returns the list or mapping that a text describes.

    Raises:
        ConfigurationError: The text is not YAML, or describes a Python object.
    """
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = getattr(error, "problem", None) or str(error) or type(error).__name__
        raise ConfigurationError(
            f"{place}: {text[:40]!r} is not a list or mapping in YAML ({problem.splitlines()[0]})."
        ) from None
