"""Settings of recipes that read your files, and errors that name them instead of `pack`'s flags."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _joined(value: Any) -> Any:
    return ",".join(value) if isinstance(value, list) else value


class TextSettings(BaseModel):
    """Settings that overrule what is detected in text files."""

    encoding: str | None = None  # such as cp1252; default: detected
    splits: str | None = None  # such as train=Trn,validation=Tst, or none; default: by their names


class TableSettings(TextSettings):
    """Settings that overrule what is detected in tables."""

    # NAME=TYPE for each column that is not what it seems, such as zip=text
    column: Annotated[list[str], BeforeValidator(_as_list)] = []
    delimiter: str | None = None  # between the cells of CSV files; default: detected
    quote: str | None = None  # around the cells of CSV files, or none; default: detected
    # A,B,C: names of the columns of CSV files without a row of names; none: column_1, column_2, ...
    header: Annotated[str | None, BeforeValidator(_joined)] = None


def in_settings(message: str) -> str:
    """Returns an error message with `--set NAME=` in place of the flags of `pipelines.pack`."""
    message = message.replace("--skip-damaged", "--set skip_damaged=true")
    names = "|".join(TableSettings.model_fields)
    return re.sub(
        rf"--({names})\b( (?=\S))?", lambda m: f"--set {m[1]}{'=' if m[2] else ''}", message
    )
