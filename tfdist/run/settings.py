"""Values of fields, each with the place where it stands, and the configuration that they make."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from tfdist.config import TrainConfig
from tfdist.errors import ConfigurationError, did_you_mean

_FORM = "expected lines like 'epochs: 3'"


class Setting(NamedTuple):
    """A value, and where the user finds it: `--epochs`, or `run.yaml, line 3: epochs`."""

    value: Any
    place: str


Layer = Mapping[str, Setting]


def resolve(layers: Sequence[Layer]) -> TrainConfig:
    """Returns the configuration of fields by name; a later layer overrides an earlier one.

    Raises:
        ConfigurationError: There is no such field, or a value does not fit; names its place.
    """
    settings = {name: setting for layer in layers for name, setting in layer.items()}
    for name, setting in settings.items():
        if name not in TrainConfig.model_fields:
            hint = did_you_mean(name, TrainConfig.model_fields)
            raise ConfigurationError(f"{setting.place}: there is no such field.{hint}")
    try:
        return TrainConfig(**{name: setting.value for name, setting in settings.items()})
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        raise ConfigurationError(f"{settings[name].place}: {mistake(error)}") from None


def mistake(error: ValidationError) -> str:
    """The first field that does not fit: what it takes and what came, on one line."""
    first, *_ = details = error.errors()
    of_field = [detail["msg"] for detail in details if detail["loc"][0] == first["loc"][0]]
    if first["type"] == "value_error":
        return first["msg"].removeprefix("Value error, ")
    takes = [text.removeprefix("Input should be ").split(", unable")[0] for text in of_field]
    got = first["input"]
    hint = did_you_mean(got, re.findall(r"'([^']+)'", " ".join(takes)))
    return f"expected {' or '.join(takes)}, got {got!r}.{hint}"


def read(path: Path) -> Layer:
    """Reads a YAML file of fields.

    Raises:
        ConfigurationError: It cannot be read, is none, or has a field twice; names the line.
    """
    try:
        loader = yaml.SafeLoader(path.read_text("utf-8"))
        node = loader.get_single_node()
        if isinstance(node, yaml.MappingNode):
            return _settings(loader, node, str(path))
    except OSError as error:
        raise ConfigurationError(f"--config {path}: {error.strerror}.") from None
    except (UnicodeDecodeError, yaml.reader.ReaderError):
        raise ConfigurationError(f"--config {path}: this is no text; {_FORM}.") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigurationError(f"{path}, line {line}: no YAML: {error.problem}.") from None
    what = "is empty" if node is None else "holds something else"
    raise ConfigurationError(f"--config {path}: the file {what}; {_FORM}.")


def _settings(loader: yaml.SafeLoader, node: yaml.MappingNode, file: str) -> Layer:
    """The values of a mapping, by key."""
    found: dict[str, Setting] = {}
    for key, value in node.value:
        name = str(key.value)
        place = f"{file}, line {key.start_mark.line + 1}: {name}"
        if name in found:
            raise ConfigurationError(f"{place}: the second of this name; leave one of them out.")
        found[name] = Setting(loader.construct_object(value, deep=True), place)
    return found
