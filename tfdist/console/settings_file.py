"""Reads settings from a YAML file, with the line number of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import pipelines
from pipelines import storage
from pipelines.storage import is_url
from tfdist.errors import ConfigurationError, first_line

_EXPECTED = "expected lines like 'epochs: 3'"


class Setting(NamedTuple):
    """A value, and where the user set it: `--epochs`, or `run.yaml, line 3: epochs`."""

    value: Any
    place: str


#: Settings by field; a hyperparameter of the recipe is `set.NAME`.
Layer = Mapping[str, Setting]
HYPERPARAMETER_PREFIX = "set."


def read(path: str) -> Layer:
    """Reads a YAML file of settings.

    Raises:
        ConfigurationError: The file cannot be read, is not a YAML mapping, or sets a field twice.
            The message names the line.
    """
    try:
        loader = yaml.SafeLoader(storage.at(path).read_bytes().decode())
        node = loader.get_single_node()
        if isinstance(node, yaml.MappingNode):
            return _settings(loader, node, path)
    except OSError as error:
        raise ConfigurationError(f"--config {path}: {error.strerror}.") from None
    except pipelines.DataError as error:
        raise ConfigurationError(f"--config {error}") from None
    except (UnicodeDecodeError, yaml.reader.ReaderError):
        raise ConfigurationError(f"--config {path}: not a text file; {_EXPECTED}.") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigurationError(f"{path}, line {line}: invalid YAML: {error.problem}.") from None
    except (ValueError, RecursionError) as error:  # such as an invalid date
        raise ConfigurationError(f"--config {path}: invalid YAML: {first_line(error)}.") from None
    problem = "the file is empty" if node is None else "not a mapping"
    raise ConfigurationError(f"--config {path}: {problem}; {_EXPECTED}.")


def _settings(loader: yaml.SafeLoader, node: yaml.MappingNode, file: str) -> Layer:
    settings: dict[str, Setting] = {}
    for key, value in node.value:
        name = str(key.value)
        location = f"{file}, line {key.start_mark.line + 1}: {name}"
        if name in settings:
            raise ConfigurationError(f"{location}: duplicate field. Remove one of them.")
        settings[name] = Setting(loader.construct_object(value, deep=True), location)
        if f"{name}." == HYPERPARAMETER_PREFIX and isinstance(value, yaml.MappingNode):
            hyperparameters = _settings(loader, value, file)
            settings |= {
                f"{HYPERPARAMETER_PREFIX}{key}": setting for key, setting in hyperparameters.items()
            }
            del settings[name]
    return settings


def flag_values(command: Sequence[str], flag: str) -> list[str]:
    """Returns the values of a flag, given as `--flag value` or `--flag=value`."""
    given = []
    for word, following in zip(command, (*command[1:], ""), strict=True):
        name, equals, value = word.partition("=")
        if name == flag:
            given.append(value if equals else following)
    return given


def setting(command: Sequence[str], field: str) -> Setting | None:
    """Returns the value of a configuration field and where it was set; None if it is not set.

    Flags take precedence over files, and later flags and files over earlier ones.

    Raises:
        ConfigurationError: A configuration file is invalid.
    """
    flag = f"--{field.replace('_', '-')}"
    if flags := flag_values(command, flag):
        return Setting(flags[-1], flag)
    # A file that is missing here may exist on the workers' hosts. Workers report missing files.
    files = [
        file for file in flag_values(command, "--config") if is_url(file) or Path(file).exists()
    ]
    layers = [layer[field] for layer in map(read, files) if field in layer]
    return layers[-1] if layers else None
