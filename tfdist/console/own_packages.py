"""Finds tfdist's own `pipelines` and `recipes`, whose names are common words."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from tfdist.errors import ConfigurationError

_NAMES = ("pipelines", "recipes")


def put_first() -> None:
    """Has Python find tfdist's own, where a file or folder of the user's comes first on its path.

    `python -m` searches the working folder before what is installed.

    Raises:
        ConfigurationError: Another module of such a name is in use already.
    """
    home = Path(__file__).resolve().parents[2]
    others = {name: place for name in _NAMES if (place := _place(name)) != home / name}
    for name, place in others.items():
        if name in sys.modules:
            raise ConfigurationError(
                f"{name!r} is {place} here, and tfdist needs its own, {home / name}: rename the "
                "first, or run the command in another folder."
            )
    if others:
        sys.path.insert(0, str(home))
        importlib.invalidate_caches()


def _place(name: str) -> Path | None:
    """The folder, or the file, that Python takes for a package."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        return None
    origin = Path(found.origin).resolve()
    return origin.parent if origin.name == "__init__.py" else origin
