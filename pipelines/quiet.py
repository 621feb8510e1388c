"""Keeps the notes of TensorFlow's start off the terminal. Imports no TensorFlow."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def quieten_tensorflow() -> None:
    """Keeps TensorFlow's log off the terminal, unless the user set how much is to be shown.

    What matters is raised as well; the rest are pages about drivers that a machine lacks. Has to be
    called before TensorFlow is imported.
    """
    if os.environ.setdefault(_LEVEL, "3") != "0" and not any(
        isinstance(finder, _Finder) for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Has TensorFlow imported without a word.

    While its libraries load, and before they know of the level, they write to the process's
    standard error by themselves.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "tensorflow":
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        if found and found.loader:
            found.loader = _Quiet(found.loader)
        return found


class _Quiet(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with _without_standard_error():
            self._loader.exec_module(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)  # as of reading a package's files


@contextlib.contextmanager
def _without_standard_error() -> Iterator[None]:
    """Keeps what is written to descriptor 2 within the block, and shows it where that fails."""
    try:
        before = os.dup(2)
    except OSError:  # there is none to write to
        yield
        return
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            kept.seek(0)
            os.write(before, kept.read())
            raise
        finally:
            os.dup2(before, 2)
            os.close(before)
