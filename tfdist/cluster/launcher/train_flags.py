"""Reads settings of the training command from its command line and its configuration files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipelines.storage import is_url
from tfdist.console import settings_file
from tfdist.console.settings_file import Setting


def values(command: Sequence[str], flag: str) -> list[str]:
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
    if flags := values(command, flag):
        return Setting(flags[-1], flag)
    # A file that is missing here may exist on the workers' hosts. Workers report missing files.
    files = [file for file in values(command, "--config") if is_url(file) or Path(file).exists()]
    layers = [layer[field] for layer in map(settings_file.read, files) if field in layer]
    return layers[-1] if layers else None
