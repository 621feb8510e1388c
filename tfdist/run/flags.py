"""Parses a command line into a configuration.

Each layer overrides the one before it: the defaults of tfdist, those of the recipe, the files given
with `--config` in their order, the flags. This module imports no TensorFlow; the recipe may.
"""

from __future__ import annotations

import argparse
import re
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

import yaml
from jsonargparse import ActionYesNo, ArgumentParser
from pydantic import AliasChoices, BaseModel, ValidationError
from pydantic.fields import FieldInfo

from tfdist.config import EXAMPLES, GROUPS, TrainConfig
from tfdist.console import command, settings_file
from tfdist.console.settings_file import HYPERPARAMETER_PREFIX, Layer, Setting
from tfdist.errors import ConfigurationError, did_you_mean
from tfdist.run import recipe as recipes
from tfdist.run import saved_model

Model = TypeVar("Model", bound=BaseModel)

#: A message about an unknown field lists all fields if there are at most this many.
_MOST_FIELDS = 20
#: Flags that are not fields; their action runs at once.
_ACTIONS: dict[str, dict[str, Any]] = {
    "--print-config": {
        "action": "store_true",
        "help": "print the resolved configuration and exit",
    },
    "--list-recipes": {"action": "store_true", "help": "list the recipes and exit"},
    "--new-recipe": {
        "metavar": "FILE",
        "help": "write a working recipe to a .py file that you can edit, and exit",
    },
}


def parse(program: str, description: str, arguments: Sequence[str] | None) -> TrainConfig:
    """Returns the resolved configuration; `--help` and those of `_ACTIONS` print and exit.

    Raises:
        ConfigurationError: There is an unknown flag or key, or an invalid value.
    """
    parser = _parser(program, description)
    given = command.parse(parser, arguments, defaults=False).as_dict()
    if given.pop("list_recipes", False):
        recipes.print_table()
        raise SystemExit(0)
    if new := given.pop("new_recipe", None):
        recipes.write_new(new)
        raise SystemExit(0)
    only_print = given.pop("print_config", False)
    files = [settings_file.read(file) for file in given.pop("config", ())]
    # Such as `--set depth=34`; lists are YAML.
    hyperparameters: dict[str, Setting] = {}
    for word in given.pop("set", ()):
        name, is_one, text = word.partition("=")
        if not is_one:
            raise ConfigurationError(f"--set {word}: expected NAME=VALUE.")
        value = text if text[:1] not in ("[", "{") else _yaml(text, f"--set {name}")
        hyperparameters[f"{HYPERPARAMETER_PREFIX}{name}"] = Setting(value, f"--set {name}")
    flags = {name: Setting(value, flag(name)) for name, value in given.items()} | hyperparameters
    layers = [*files, flags]
    try:
        config = resolve(layers)  # finds most errors before the recipe is imported
        recipe = recipes.find(config.recipe)
        if config.smoke:
            layers = [recipes.smoke(recipe, config), *layers]
            config = resolve(layers)
        config = resolve([recipes.defaults(recipe, config), *layers])
        known = recipes.hyperparameters(recipe, config.model)
        config = with_hyperparameters(config, layers, known)
        if config.evaluate:
            saved_model.check_evaluate_flags(given)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}\nRun {program} --help for all flags.") from None
    if only_print:
        print(config.to_yaml(), end="")
        raise SystemExit(0)
    return config


def resolve(layers: Sequence[Layer]) -> TrainConfig:
    """Returns the configuration from layers of fields; later layers override earlier ones.

    Raises:
        ConfigurationError: There is no such field, or a value is invalid; the message names its
            flag or line.
    """
    current = {
        former: name
        for name, field in TrainConfig.model_fields.items()
        for former in former_names(name, field)
    }
    settings = {
        current.get(name, name): setting for layer in layers for name, setting in layer.items()
    }
    hyperparameters = {
        n: settings.pop(n) for n in list(settings) if n.startswith(HYPERPARAMETER_PREFIX)
    }
    values = checked(TrainConfig, settings, "field")
    given = {
        name.removeprefix(HYPERPARAMETER_PREFIX): setting.value
        for name, setting in hyperparameters.items()
    }
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
        name: Setting(
            value, places.get(f"{HYPERPARAMETER_PREFIX}{name}", f"{HYPERPARAMETER_PREFIX}{name}")
        )
        for name, value in config.set.items()
    }
    validated = checked(model, own, f"hyperparameter of recipe {config.recipe!r}")
    return config.model_copy(update={"set": validated.model_dump(mode="json")})


def checked(model: type[Model], settings: Layer, what: str) -> Model:
    """Returns an instance of a model from values of its fields.

    Raises:
        ConfigurationError: There is no such field, or a value is invalid; the message names its
            flag or line.
    """
    for name, setting in settings.items():
        if name not in model.model_fields:
            fields = model.model_fields
            hint = did_you_mean(name, fields)
            if not hint and len(fields) <= _MOST_FIELDS:
                hint = f" Choose one of {', '.join(fields)}." if fields else " There are none."
            raise ConfigurationError(f"{setting.place}: unknown {what}.{hint}")
    try:
        return model(**{name: setting.value for name, setting in settings.items()})
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        place = settings[name].place if name in settings else name
        raise ConfigurationError(f"{place}: {_first_problem(error)}") from None


def _parser(program: str, description: str) -> ArgumentParser:
    parser = command.parser(program, description)
    parser.add_argument(
        "--config",
        action="append",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="YAML file with fields; flags override files, and later files override earlier ones",
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
    if bool in (field.annotation, *typing.get_args(field.annotation)):
        extra |= {"action": ActionYesNo(no_prefix="no-")}
    elif name == "set":
        extra = {"action": "append", "metavar": "NAME=VALUE", "default": argparse.SUPPRESS}
    else:
        extra |= {"metavar": "DIR" if name.split("_")[-1] == "dir" else _metavar(field.annotation)}
    names = map(flag, (name, *former_names(name, field)))
    action = group.add_argument(*names, help=field.description, **extra)
    words = [word for word in _metavar(field.annotation).split("|") if not word.isupper()]
    if name == "recipe":
        words = recipes.names()
    if words:  # for argcomplete, which otherwise completes file names
        action.completer = lambda **_: words


def former_names(name: str, field: FieldInfo) -> list[str]:
    """Returns other names of a field, which flags and files may still use."""
    alias = field.validation_alias
    choices = alias.choices if isinstance(alias, AliasChoices) else []
    return [str(choice) for choice in choices if choice != name]


def flag(name: str) -> str:
    """Returns the flag of a field."""
    return "--" + name.replace("_", "-")


def _metavar(annotation: Any) -> str:
    """Returns a type's placeholder in `--help`, such as `auto|N`; its metadata may define it."""
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


def _first_problem(error: ValidationError) -> str:
    """Returns the problem of the first invalid field: expected and actual value, on one line."""
    first, *_ = details = error.errors()
    of_field = [_message(detail) for detail in details if detail["loc"][0] == first["loc"][0]]
    if first["type"] == "value_error":
        return first["msg"].removeprefix("Value error, ")
    takes = [text.removeprefix("Input should be ").split(", unable")[0] for text in of_field]
    got = first["input"]
    hint = did_you_mean(got, re.findall(r"'([^']+)'", " ".join(takes)))
    return f"expected {' or '.join(takes)}, got {got!r}.{hint}"


def _message(detail: Any) -> str:
    """Returns pydantic's message, but an example in place of a regular expression."""
    example = EXAMPLES.get(detail.get("ctx", {}).get("pattern"))
    return f"a value like {example}" if example else str(detail["msg"])


def _yaml(text: str, place: str) -> Any:
    """Returns the list or mapping that a text describes."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = getattr(error, "problem", None) or str(error) or type(error).__name__
        raise ConfigurationError(
            f"{place}: {text[:40]!r} is not a list or mapping in YAML ({problem.splitlines()[0]})."
        ) from None
