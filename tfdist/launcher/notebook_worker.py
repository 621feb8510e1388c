"""What a worker of `tfdist.notebook_launch` does: it calls a function of the notebook."""

from __future__ import annotations

from collections.abc import Callable

import cloudpickle

from tfdist import cluster


def make_answer() -> Callable[[bytes], bytes | None]:
    """Returns what the pool of workers calls."""
    return _call


def _call(function: bytes) -> bytes | None:
    """Calls a function that cloudpickle wrote, and returns as such what it returned on rank 0."""
    returned = cloudpickle.loads(function)()
    cluster.end()
    if not cluster.is_chief():
        return None
    try:
        return cloudpickle.dumps(returned)
    except Exception as error:
        raise TypeError(
            f"The function returned {type(returned).__name__}, which pickle does not take: "
            "return numbers or arrays, or save to a file."
        ) from error
