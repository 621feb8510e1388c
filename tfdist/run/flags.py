"""From a command line to a configuration.

Each layer overrides the one before it: the defaults of tfdist, those of the recipe, the files given
with `--config` in their order, the flags. This module imports no TensorFlow; the recipe may.
"""

from __future__ import annotations

import argparse
import sys
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from jsonargparse import ActionYesNo, ArgumentParser
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from tfdist.config import GROUPS, TrainConfig
from tfdist.console import command
from tfdist.errors import ConfigurationError
from tfdist.run import recipe as recipes
from tfdist.strategies import STRATEGIES


def parse(program: str, description: str, arguments: Sequence[str] | None) -> TrainConfig:
    """Returns the resolved configuration; `--help` and `--print-config` print and exit.

    Args:
        program: how the command is called, for its usage line.
        description: what it does.
        arguments: the command line without the program's name, or None for this process's.

    Raises:
        ConfigurationError: an unknown flag or key, or a value that does not fit.
    """
    given = _config_files_first(sys.argv[1:] if arguments is None else arguments)
    parser = _parser(program, description)
    config, _ = _read(parser, given)  # finds the recipe, and most errors before it is imported
    defaults = recipes.find(config.recipe).DEFAULTS
    if unknown := set(defaults) - set(TrainConfig.model_fields):
        raise ConfigurationError(
            f"Recipe {config.recipe!r} has DEFAULTS that are no fields of TrainConfig: "
            f"{', '.join(sorted(unknown))}."
        )
    parser.set_defaults(dict(defaults))
    config, only_print = _read(parser, given)
    if only_print:
        print(config.to_yaml(), end="")
        raise SystemExit(0)
    return config


def _config_files_first(arguments: Sequence[str]) -> list[str]:
    """Moves `--config FILE` to the front: flags override files wherever they stand.

    jsonargparse applies arguments from left to right.
    """
    files = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    files.add_argument("--config", action="append", default=[])
    try:
        known, rest = files.parse_known_args(list(arguments))
    except argparse.ArgumentError:
        return list(arguments)  # `--config` without a file: the real parser says so
    return [f"--config={file}" for file in known.config] + rest


def _parser(program: str, description: str) -> ArgumentParser:
    """The flags: one for each field of `TrainConfig`, in the groups of its bases."""
    parser = command.parser(program, description)
    parser.add_argument(
        "--config", action="config", metavar="FILE", help="YAML file of fields; flags override it"
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        default=argparse.SUPPRESS,
        help="print the resolved configuration and exit",
    )
    for base in GROUPS:
        group = parser.add_argument_group(str(base.__doc__).rstrip("."))
        for name, field in base.model_fields.items():
            _add_flag(group, name, field)
    return parser


def _add_flag(group: Any, name: str, field: FieldInfo) -> None:
    """Adds the flag of one field. Values stay as they come: TrainConfig is what checks them."""
    flag = "--" + name.replace("_", "-")
    default = field.get_default(call_default_factory=True, validated_data={})
    extra: dict[str, Any] = {"default": argparse.SUPPRESS if default is None else default}
    if field.annotation is bool:
        extra |= {"action": ActionYesNo(no_prefix="no-")}
    elif name == "strategy":
        extra |= {"choices": list(STRATEGIES)}
    else:
        extra |= {"metavar": "DIR" if name.split("_")[-1] == "dir" else _metavar(field.annotation)}
    group.add_argument(flag, help=field.description, **extra)


def _metavar(annotation: Any) -> str:
    """How a type is written in `--help`: `auto|N`, `NAME`, `X`."""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) is typing.Literal:
        return "|".join(typing.get_args(annotation))
    if not isinstance(annotation, type) and typing.get_args(annotation):
        parts = [_metavar(part) for part in typing.get_args(annotation) if part is not type(None)]
        return "|".join(parts)
    return {int: "N", float: "X", str: "NAME"}.get(annotation, "NAMES")


def _read(parser: ArgumentParser, arguments: Sequence[str]) -> tuple[TrainConfig, bool]:
    """Returns the configuration, and whether it is only to be printed."""
    try:
        values: Mapping[str, Any] = command.parse(parser, arguments).as_dict()
        fields = {key: value for key, value in values.items() if key in TrainConfig.model_fields}
        return TrainConfig(**fields), "print_config" in values
    except ValidationError as error:
        raise ConfigurationError(
            f"{_message(error)}\n{parser.prog} --help lists what there is."
        ) from None


def _message(error: ValidationError) -> str:
    """The first field that does not fit, what it takes and what came, on one line."""
    details = error.errors()
    name = details[0]["loc"][0]
    of_field = [detail for detail in details if detail["loc"][0] == name]
    takes = [d["msg"].removeprefix("Input should be ").split(", unable")[0] for d in of_field]
    got = details[0]["input"]
    return f"--{str(name).replace('_', '-')}: expected {' or '.join(takes)}, got {got!r}."
