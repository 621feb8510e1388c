"""A YAML file of fields, each value with the place where it stands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tfdist.errors import ConfigurationError

_FORM = "expected lines like 'epochs: 3'"


class Setting(NamedTuple):
    """A value, and where the user finds it: `--epochs`, or `run.yaml, line 3: epochs`."""

    value: Any
    place: str


#: By field; a hyperparameter of the recipe's own is `set.NAME`.
Layer = Mapping[str, Setting]
OWN = "set."


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
    except (ValueError, RecursionError) as error:  # a date that does not exist, say
        reason = str(error).splitlines()[0]
        raise ConfigurationError(f"--config {path}: this is not valid YAML: {reason}.") from None
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
        if f"{name}." == OWN and isinstance(value, yaml.MappingNode):
            own = _settings(loader, value, file)
            found |= {f"{OWN}{key}": setting for key, setting in own.items()}
            del found[name]
    return found
