"""Rules by which layers are split: axes of weights, by their paths. Imports no TensorFlow."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import AfterValidator, BeforeValidator

from tfdist.errors import ConfigurationError

#: By regular expressions on paths of variables: an axis that is not None is the one to cut.
Rules = Mapping[str, Sequence[str | None]]

_FORM = "expected lines like 'dense/kernel: [null, model]'"


def checked(rules: Rules) -> Rules:
    """Returns rules, when what stands for paths in them are regular expressions.

    Raises:
        ConfigurationError: One is none.
    """
    for rule in rules:
        try:
            re.compile(rule)
        except re.error as error:
            raise ConfigurationError(
                f"the rule {rule!r} of a layout is no regular expression ({error}): write one that "
                "finds paths of weights, like 'dense/kernel'."
            ) from None
    return rules


def _read(value: object) -> object:
    """Returns the rules in a YAML file; what is no name of a file is returned as it is."""
    if not isinstance(value, str):
        return value
    try:
        found = yaml.safe_load(Path(value).read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{value}: {error.strerror}; {_FORM} in a file.") from None
    except (UnicodeDecodeError, yaml.YAMLError):
        raise ValueError(f"{value} is no YAML; {_FORM}.") from None
    if not isinstance(found, Mapping):
        raise ValueError(f"{value} holds no rules; {_FORM}.")
    return found


#: For a command line and a configuration: rules, or the name of a YAML file that holds them.
RulesOrFile = Annotated[
    dict[str, list[str | None]], BeforeValidator(_read), AfterValidator(checked), "FILE"
]
