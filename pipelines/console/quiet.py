"""Silences TensorFlow's start-up messages. Does not import TensorFlow."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def quieten_tensorflow(level: str = "3") -> None:
    """Hides TensorFlow's log messages unless the user set `TF_CPP_MIN_LOG_LEVEL`.

    Real errors are raised as exceptions anyway; the rest is mostly about missing drivers. Call this
    before TensorFlow is imported.

    Args:
        level: The value for `TF_CPP_MIN_LOG_LEVEL`: 1 hides information, 2 warnings, 3 errors too.
    """
    if os.environ.setdefault(_LEVEL, level) != "0" and not any(
        isinstance(finder, _Finder) for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, _Finder())


def quieten_notebook() -> None:
    """Hides TensorFlow's INFO messages in a notebook or another interactive session.

    Only there does TensorFlow print them by default. `TF_CPP_MIN_LOG_LEVEL=0`, or
    `tf.get_logger().setLevel("INFO")` after this call, shows them.
    """
    if not _is_interactive() or os.environ.get(_LEVEL) == "0":
        return
    if tensorflow := sys.modules.get("tensorflow"):
        _hide_information(tensorflow)
    else:
        quieten_tensorflow("1")


def _is_interactive() -> bool:
    return hasattr(sys, "ps1")  # the prompt, by which TensorFlow tells too


def _hide_information(tensorflow: ModuleType) -> None:
    logger: logging.Logger = tensorflow.get_logger()
    if logger.level == logging.INFO:  # TensorFlow's default of interactive sessions
        logger.setLevel(logging.WARNING)


class _Finder(MetaPathFinder):
    """Import hook that hides what TensorFlow prints while it is imported.

    Its libraries write to standard error while they load, before they read the log level.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "tensorflow":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec and spec.loader:
            spec.loader = _Quiet(spec.loader)
        return spec


class _Quiet(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with _without_standard_error():
            self._loader.exec_module(module)
        if _is_interactive():
            _hide_information(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)  # for example, the reader of package resources


@contextlib.contextmanager
def _without_standard_error() -> Iterator[None]:
    """Captures standard error (descriptor 2) in the block and prints it only if the block fails."""
    try:
        before = os.dup(2)
    except OSError:  # the process has no standard error
        yield
        return
    # Linux needs no folder for a file in memory.
    in_memory = hasattr(os, "memfd_create")
    with (
        os.fdopen(os.memfd_create("stderr"), "rb") if in_memory else tempfile.TemporaryFile()
    ) as captured:
        os.dup2(captured.fileno(), 2)
        try:
            yield
        except BaseException:
            captured.seek(0)
            os.write(before, captured.read())
            raise
        finally:
            os.dup2(before, 2)
            os.close(before)
