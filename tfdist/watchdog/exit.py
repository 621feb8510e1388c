"""The end of a worker whose main thread waits for what will not come."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
from typing import NoReturn

#: Tells launchers that not this worker failed, but one that it waited for.
EXIT_CODE = 75


def exit_now(reason: str) -> NoReturn:
    """Prints why, and the stacks of all threads, and ends this process.

    By force: what tidies up as a process ends waits for the others, too.
    """
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        print(
            f"error: {reason}\nThis process ends with code {EXIT_CODE}. Its threads are at:",
            file=sys.stderr,
            flush=True,
        )
        # Of the process, not of sys.stderr: a notebook's own has no file.
        faulthandler.dump_traceback(2)
    os._exit(EXIT_CODE)
