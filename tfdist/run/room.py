"""Room on the disk for a model: asked for before the training, found elsewhere after it."""

from __future__ import annotations

import errno
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from tfdist.console.files import replacing

_OTHER_FILES = 2**20  # bytes: metrics, curves, TensorBoard's events
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def probe(path: Path, model: Any) -> None:
    """Asks a folder's disk for the room that a run takes, and gives it back.

    Args:
        path: The folder.
        model: The compiled `keras.Model` that will be saved there with its optimizer.

    Raises:
        OSError: There is none, or no permission.
    """
    import tensorflow as tf

    variables = [*model.variables, *model.optimizer.variables]
    sizes = (math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables)
    with replacing(path / "probe") as file, file.open("wb") as opened:
        os.posix_fallocate(opened.fileno(), 0, sum(sizes) + _OTHER_FILES)
    (path / "probe").unlink()


def lacking(error: Exception) -> str:
    """What an error of Python or TensorFlow says of a full disk or a used-up quota, if it does."""
    return next((os.strerror(number) for number in _FULL if os.strerror(number) in str(error)), "")


def save(model: Any, path: Path) -> tuple[Path, Exception | None]:
    """Saves a Keras model whole, or elsewhere where that fails.

    Args:
        model: A `keras.Model`.
        path: Where to.

    Returns:
        Where it is, and why it is not at `path`.

    Raises:
        Exception: Of saving at `path`, where it cannot be saved anywhere.
    """
    try:
        with replacing(path) as file:
            model.save(file)
    except Exception as error:  # of the system, of h5py or of zipfile
        for place in (Path.cwd(), Path.home(), Path(tempfile.gettempdir()), Path("/dev/shm")):
            try:
                elsewhere = Path(tempfile.mkdtemp(prefix="tfdist-", dir=place)) / path.name
                with replacing(elsewhere) as file:
                    model.save(file)
            except Exception:
                continue
            return elsewhere, error
        raise
    return path, None
