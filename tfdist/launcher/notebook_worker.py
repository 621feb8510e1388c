"""A worker of `tfdist.notebook_launch`: `call.py TASK RESULT` calls the function in a file.

It is run as a file, and takes the notebook's path before it imports anything of it.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path


def main(task: str, result: str) -> None:
    """Reads the function, calls it, and writes what it returned if this is rank 0."""
    with Path(task).open("rb") as file:
        sys.path[:] = pickle.load(file)
        fn = pickle.load(file)
    returned = fn()

    import cloudpickle

    from tfdist.cluster import is_chief

    if is_chief():
        try:
            Path(result).write_bytes(cloudpickle.dumps(returned))
        except Exception as error:
            raise TypeError(
                f"The function returned {type(returned).__name__}, which pickle does not take: "
                "return numbers or arrays, or save to a file."
            ) from error


if __name__ == "__main__":
    main(*sys.argv[1:])
