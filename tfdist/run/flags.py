"""Parses a command line into a configuration.

Each layer overrides the one before it: the defaults of tfdist, those of the recipe, the files given
with `--config` in their order, the flags. This module imports no TensorFlow; the recipe may.
"""

from __future__ import annotations

import argparse
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ActionYesNo, ArgumentParser
from pydantic.fields import FieldInfo

from tfdist.config import GROUPS, TrainConfig
from tfdist.console import command, settings_file
from tfdist.console.settings_file import Setting
from tfdist.errors import ConfigurationError
from tfdist.run import catalogue, evaluating, settings
from tfdist.run import recipe as recipes

#: Flags that are not fields; their action runs at once.
_ACTIONS: dict[str, dict[str, Any]] = {
    "--print-config": {
        "action": "store_true",
        "help": "print the resolved configuration and exit",
    },
    "--list-recipes": {"action": "store_true", "help": "print what there is to train and exit"},
    "--new-recipe": {
        "metavar": "FILE",
        "help": "write a recipe that works, a .py file to change, and exit",
    },
}


def parse(program: str, description: str, arguments: Sequence[str] | None) -> TrainConfig:
    """Returns the resolved configuration; `--help` and those of `_ACTIONS` print and exit.

    Args:
        program: how the command is called, for its usage line.
        description: what it does.
        arguments: the command line without the program's name, or None for this process's.

    Raises:
        ConfigurationError: an unknown flag or key, or a value that does not fit.
    """
    parser = _parser(program, description)
    given = command.parse(parser, arguments, defaults=False).as_dict()
    if given.pop("list_recipes", False):
        catalogue.show()
        raise SystemExit(0)
    if new := given.pop("new_recipe", None):
        catalogue.write_new(new)
        raise SystemExit(0)
    only_print = given.pop("print_config", False)
    files = [settings_file.read(Path(file)) for file in given.pop("config", ())]
    own = settings.own_from_flags(given.pop("set", ()))
    flags = {name: Setting(value, flag(name)) for name, value in given.items()} | own
    layers = [*files, flags]
    try:
        config = settings.resolve(layers)  # finds most errors before the recipe is imported
        recipe = recipes.find(config.recipe)
        if config.smoke:
            layers = [recipes.smoke(recipe, config), *layers]
            config = settings.resolve(layers)
        config = settings.resolve([recipes.defaults(recipe, config), *layers])
        known = recipes.hyperparameters(recipe, config.model)
        config = settings.with_hyperparameters(config, layers, known)
        if config.evaluate:
            evaluating.check_fields(given)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}\n{program} --help lists what there is.") from None
    if only_print:
        print(config.to_yaml(), end="")
        raise SystemExit(0)
    return config


def _parser(program: str, description: str) -> ArgumentParser:
    """Returns a parser with a flag for each field of `TrainConfig`, in groups."""
    parser = command.parser(program, description)
    parser.add_argument(
        "--config",
        action="append",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="YAML file of fields; flags override it, and later files earlier ones",
    )
    for flag, options in _ACTIONS.items():
        parser.add_argument(flag, default=argparse.SUPPRESS, **options)
    for base in GROUPS:
        group = parser.add_argument_group(str(base.__doc__).rstrip("."))
        for name, field in base.model_fields.items():
            add_flag(group, name, field)
    return parser


def add_flag(group: Any, name: str, field: FieldInfo) -> None:
    """Adds the flag of one field. `TrainConfig` checks the value."""
    default = field.get_default(call_default_factory=True, validated_data={})
    extra: dict[str, Any] = {"default": argparse.SUPPRESS if default is None else default}
    if field.annotation is bool:
        extra |= {"action": ActionYesNo(no_prefix="no-")}
    elif name == "set":
        extra = {"action": "append", "metavar": "NAME=VALUE", "default": argparse.SUPPRESS}
    else:
        extra |= {"metavar": "DIR" if name.split("_")[-1] == "dir" else _metavar(field.annotation)}
    action = group.add_argument(flag(name), help=field.description, **extra)
    words = recipes.names() if name == "recipe" else _words(field.annotation)
    if words:  # for argcomplete, which looks for files otherwise
        action.completer = lambda **_: words


def flag(name: str) -> str:
    """Returns the flag of a field."""
    return "--" + name.replace("_", "-")


def _words(annotation: Any) -> list[str]:
    """Returns the literal values of a type, for shell completion."""
    return [word for word in _metavar(annotation).split("|") if not word.isupper()]


def _metavar(annotation: Any) -> str:
    """How a type is written in `--help`: `auto|N`, `NAME`, `X`; a text among its notes says it."""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, *notes = typing.get_args(annotation)
        if words := [note for note in notes if isinstance(note, str)]:
            return words[0]
    if typing.get_origin(annotation) is typing.Literal:
        return "|".join(typing.get_args(annotation))
    if not isinstance(annotation, type) and typing.get_args(annotation):
        parts = [_metavar(part) for part in typing.get_args(annotation) if part is not type(None)]
        return "|".join(parts)
    return {int: "N", float: "X", str: "NAME"}.get(annotation, "NAMES")
