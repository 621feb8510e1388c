"""The program of a worker of `tfdist.ray.train`: `python -m tfdist.ray.worker`."""

from __future__ import annotations

import sys
from pathlib import Path

import cloudpickle

from tfdist import cluster
from tfdist.cluster.launcher.notebook import pickled_result
from tfdist.ray.reports import receive_function, send_result


def main() -> None:
    """Calls the function that the actor sends, and sends its result on rank 0."""
    import_path, function = cloudpickle.loads(receive_function())
    # Allows imports of modules next to the caller's script or notebook, if this node has them.
    sys.path += [p for p in import_path if p not in sys.path and Path(p or ".").exists()]
    returned = cloudpickle.loads(function)()
    cluster.end()
    if cluster.is_chief():
        send_result(pickled_result(returned))


if __name__ == "__main__":
    main()
