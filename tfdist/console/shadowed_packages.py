"""Resolves name conflicts between the packages `pipelines` and `recipes` and the user's modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from tfdist.errors import ConfigurationError

_NAMES = ("pipelines", "recipes")
_HOME = Path(__file__).resolve().parents[2]


def put_first() -> None:
    """Puts tfdist's packages first on the import path if the user's modules shadow them.

    `python -m` searches the working directory before the installed packages.

    Raises:
        ConfigurationError: A module of the user with such a name is already imported.
    """
    shadowing = {name: path for name in _NAMES if (path := _location(name)) != _HOME / name}
    for name, path in shadowing.items():
        if name in sys.modules:
            raise _conflict(name, path, ", or run the command in another folder")
    if shadowing:
        sys.path.insert(0, str(_HOME))
        importlib.invalidate_caches()


def check() -> None:
    """Checks that a script's own `pipelines` does not shadow that of tfdist, which trainers need.

    Raises:
        ConfigurationError: It does.
    """
    if (path := _location("pipelines")) != _HOME / "pipelines":
        raise _conflict("pipelines", path, "")


def _conflict(name: str, path: Path | None, alternative: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name!r} was imported from {path}, but tfdist needs its own package {_HOME / name}. "
        f"Rename your module{alternative}."
    )


def _location(name: str) -> Path | None:
    """Returns the folder or file from which Python imports a package; None if there is none."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    origin = Path(spec.origin).resolve()
    return origin.parent if origin.name == "__init__.py" else origin
