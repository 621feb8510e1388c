"""Full disks: they are noticed before a training, and its model is saved elsewhere."""

from __future__ import annotations

import errno
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tfdist.console import folders
from tfdist.console.files import replacing

_OTHER_BYTES = 2**20  # of metrics, curves and TensorBoard's events
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def probe_space(path: Path, model: Any) -> None:
    """Checks that a folder's disk has enough space for a run, by allocating it temporarily.

    Args:
        path: The folder.
        model: The compiled `keras.Model` that will be saved there with its optimizer.

    Raises:
        OSError: There is not enough space, or no permission.
    """
    import tensorflow as tf

    variables = [*model.variables, *model.optimizer.variables]
    sizes = (math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables)
    num_bytes = sum(sizes) + _OTHER_BYTES
    with replacing(path / "probe") as file, file.open("wb") as opened:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(opened.fileno(), 0, num_bytes)
        elif shutil.disk_usage(path).free < num_bytes:  # macOS
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    (path / "probe").unlink()


def full_disk_message(error: Exception) -> str:
    """Returns an error's message about a full disk or an exceeded quota; empty for other errors."""
    return next((os.strerror(number) for number in _FULL if os.strerror(number) in str(error)), "")


def save_model(model: Any, path: Path) -> tuple[Path, Exception | None]:
    """Saves a Keras model, in another folder if the disk is full.

    Args:
        model: A `keras.Model`.
        path: The file to write.

    Returns:
        The file that was written, and the error if it is not `path`.

    Raises:
        Exception: The error of saving to `path`, if the model cannot be saved anywhere.
    """
    try:
        with replacing(path) as file:
            model.save(file)
    except Exception as error:  # the system, h5py and zipfile raise different errors
        for place in folders.rescue():
            try:
                folder = Path(tempfile.mkdtemp(prefix="tfdist-", dir=place))
            except OSError:
                continue
            try:
                with replacing(folder / path.name) as file:
                    model.save(file)
            except Exception:
                folder.rmdir()
                continue
            return folder / path.name, error
        raise
    return path, None
