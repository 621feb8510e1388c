"""Resolves conflicts of the packages `pipelines` and `recipes` with modules of the user."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from tfdist.errors import ConfigurationError

_NAMES = ("pipelines", "recipes")


def put_first() -> None:
    """Puts tfdist's packages first on the import path if modules of the user hide them.

    `python -m` searches the working directory before the installed packages.

    Raises:
        ConfigurationError: Another module of that name is already imported.
    """
    home = Path(__file__).resolve().parents[2]
    others = {name: place for name in _NAMES if (place := _place(name)) != home / name}
    for name, place in others.items():
        if name in sys.modules:
            raise ConfigurationError(
                f"{name!r} was imported from {place}, but tfdist needs its package "
                f"{home / name}. Rename the former, or run the command in another folder."
            )
    if others:
        sys.path.insert(0, str(home))
        importlib.invalidate_caches()


def _place(name: str) -> Path | None:
    """Returns the folder or file from which Python imports a package; None if there is none."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    origin = Path(spec.origin).resolve()
    return origin.parent if origin.name == "__init__.py" else origin
