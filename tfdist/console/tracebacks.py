"""Tracebacks of errors in a user's own code, without the frames of frameworks."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

#: Set to anything, this environment variable makes commands print every frame.
FULL = "TFDIST_FULL_TRACEBACK"

_ROOT = Path(__file__).parents[2]
_FRAMEWORKS = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    str(_ROOT / "tfdist"),
    str(_ROOT / "pipelines"),
    "<",  # such as <frozen runpy>
)


def folded(error: BaseException) -> str:
    """Returns the traceback of an error with the frames of the user's files only.

    Frames of Python, of installed packages, of tfdist and of pipelines are left out and counted. If
    no other frame is there, all are shown.

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
    found = traceback.TracebackException.from_exception(error)
    num_hidden = 0
    for one in _chain(found):
        own = [frame for frame in one.stack if not frame.filename.startswith(_FRAMEWORKS)]
        if own:
            num_hidden += len(one.stack) - len(own)
            one.stack = traceback.StackSummary.from_list(own)
    text = "".join(found.format())
    if not num_hidden:
        return text
    return f"{num_hidden} frames of frameworks are left out; {FULL}=1 shows them.\n{text}"


def show(error: BaseException) -> None:
    """Prints `folded(error)` on standard error, or raises the error again if `FULL` is set."""
    if os.environ.get(FULL):
        raise error
    print(folded(error), end="", file=sys.stderr, flush=True)


def _chain(
    error: traceback.TracebackException | None,
) -> Iterator[traceback.TracebackException]:
    """Yields an error, and those that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
