"""Rules to split layers by: axes of weights, by their paths. Imports no TensorFlow."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import AfterValidator, BeforeValidator

from tfdist.errors import ConfigurationError

#: By regular expressions on paths of variables: the axis that is not None is split.
Rules = Mapping[str, Sequence[str | None]]

_FORM = "expected lines like 'dense/kernel: [null, model]'"


def checked(rules: Rules) -> Rules:
    """Checks that the keys of rules are regular expressions, and returns the rules.

    Raises:
        ConfigurationError: One is not a regular expression.
    """
    for rule in rules:
        try:
            re.compile(rule)
        except re.error as error:
            raise ConfigurationError(
                f"the rule {rule!r} of a layout is not a regular expression ({error}): write one "
                "that matches paths of weights, like 'dense/kernel'."
            ) from None
    return rules


def _read(value: object) -> object:
    """Returns the rules in a YAML file; a value that is not a string is returned as it is."""
    if not isinstance(value, str):
        return value
    try:
        rules = yaml.safe_load(Path(value).read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{value}: {error.strerror}; {_FORM} in a file.") from None
    except (UnicodeDecodeError, yaml.YAMLError):
        raise ValueError(f"{value} is no YAML; {_FORM}.") from None
    if not isinstance(rules, Mapping):
        raise ValueError(f"{value} holds no rules; {_FORM}.")
    return rules


#: For the command line and configurations: rules, or the name of a YAML file with rules.
RulesOrFile = Annotated[
    dict[str, list[str | None]], BeforeValidator(_read), AfterValidator(checked), "FILE"
]
