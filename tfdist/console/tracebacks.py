"""Tracebacks of errors in a user's own code, without the frames of frameworks."""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

#: If this environment variable is set, commands print every frame.
FULL = "TFDIST_FULL_TRACEBACK"

_ROOT = Path(__file__).parents[2]
_FRAMEWORKS = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    str(_ROOT / "tfdist"),
    str(_ROOT / "pipelines"),
    "<",  # such as <frozen runpy>
)


def folded(error: BaseException) -> str:
    """Returns the traceback of an error with only the frames of the user's files.

    Frames of Python, installed packages, tfdist and pipelines are hidden and counted. If there are
    no other frames, all are shown.

    Example:
        >>> from tfdist.console import tracebacks
        >>> try:
        ...     int("three")
        ... except ValueError as error:
        ...     print(tracebacks.folded(error).splitlines()[-1])
        ValueError: invalid literal for int() with base 10: 'three'

    Args:
        error: An exception that was caught.
    """
    shown = traceback.TracebackException.from_exception(error)
    num_hidden = 0
    for exception in _chain(shown):
        user_frames = [f for f in exception.stack if not f.filename.startswith(_FRAMEWORKS)]
        if user_frames:
            num_hidden += len(exception.stack) - len(user_frames)
            exception.stack = traceback.StackSummary.from_list(user_frames)
    text = "".join(shown.format())
    if not num_hidden:
        return text
    return f"{num_hidden} framework frames are hidden; set {FULL}=1 to show them.\n{text}"


def caller() -> str:
    """Returns the innermost line of the user's files that is running, such as `train.py:12`."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_FRAMEWORKS):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def line_of(error: BaseException) -> str:
    """Returns the innermost line of the user's files that led to an error; empty if there is none.

    Example: `train.py, line 12: model.fit(x, y)`.
    """
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if not frame.filename.startswith(_FRAMEWORKS):
            return f"{Path(frame.filename).name}, line {frame.lineno}: {frame.line}"
    return ""


def show(error: BaseException) -> None:
    """Prints `folded(error)` on standard error, or raises the error again if `FULL` is set."""
    if os.environ.get(FULL):
        raise error
    print(folded(error), end="", file=sys.stderr, flush=True)


def _chain(
    error: traceback.TracebackException | None,
) -> Iterator[traceback.TracebackException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
