"""The options that strategies declare in their table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field, create_model

from tfdist.strategies import options_by_name


def options_of_strategies(groups: Sequence[type[BaseModel]]) -> type[BaseModel]:
    """A field for each option that a strategy declares; None where it is left out.

    Args:
        groups: The other groups, whose names are taken.

    Raises:
        ValueError: One name means different things.
    """
    taken = {name for group in groups for name in group.model_fields}
    fields: dict[str, Any] = {}
    for name, declared in options_by_name().items():
        option, *others = declared.values()
        if name in taken or any(other != option for other in others):
            raise ValueError(
                f"{' and '.join(declared)}: the option {name!r} means something else already, in "
                "another strategy or in TrainConfig: rename it."
            )
        text = f"{' and '.join(declared)}: {option.help}; left out: {option.default}"
        fields[name] = (option.type | None, Field(None, description=text))
    return create_model("StrategyOptions", __doc__="Options of strategies.", **fields)
