"""`--list-recipes` and `--new-recipe`. Recipes are read as text, without importing TensorFlow."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from tfdist.console import tables
from tfdist.errors import ConfigurationError
from tfdist.run import recipe

_TEMPLATE = f"{recipe.PACKAGE}._template"


def show() -> None:
    """Prints a table of the recipes that come with tfdist, with a line on each."""
    tables.facts((name, first_line(name)) for name in recipe.names())


def first_line(name: str) -> str:
    """Returns the first line of a recipe's docstring.

    Args:
        name: Name of a module of the package `recipes`.
    """
    text = ast.get_docstring(ast.parse(_source(f"{recipe.PACKAGE}.{name}")))
    return (text or "").partition("\n")[0]


def write_new(file: str) -> None:
    """Writes a working recipe as a starting point.

    Args:
        file: Path of the new file; ends in `.py`.

    Raises:
        ConfigurationError: The file exists, or cannot be written.
    """
    path = Path(file)
    if path.suffix != ".py":
        raise ConfigurationError(f"--new-recipe {file}: expected a name that ends in .py.")
    try:
        with path.open("x") as opened:
            opened.write(_source(_TEMPLATE).replace("recipes/_template.py", file))
    except FileExistsError:
        raise ConfigurationError(f"--new-recipe {file}: it is there already.") from None
    except OSError as error:
        raise ConfigurationError(f"--new-recipe {file}: {error.strerror}.") from None
    given = file if "/" in file else f"./{file}"
    print(f"{file} is written. Train it with\n    python -m tfdist.train --recipe {given}")


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ConfigurationError(f"{module} is missing: install tfdist again.")
    return Path(spec.origin).read_text("utf-8")
