"""The files of CIFAR's Python versions, unpickled without running what they might ask for."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

from pipelines.errors import DataError


class _ArraysOnly(pickle.Unpickler):
    """A pickle can call anything; those of CIFAR need what makes an array, and no more."""

    _ALLOWED = ("_reconstruct", "ndarray", "dtype", "_frombuffer", "scalar")

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "numpy" and name in self._ALLOWED:
            # The files name modules of NumPy 1.
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes for Python 2
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def unpickled(file: Path) -> dict[str, Any]:
    """The dictionary of a file of the Python versions.

    Raises:
        DataError: it holds something else, or would call something else.
    """
    try:
        # Written by Python 2: its strings are bytes, those of array data among them.
        loaded = _ArraysOnly(io.BytesIO(file.read_bytes()), encoding="latin1").load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError) as error:
        raise DataError(f"{file}: not a batch of CIFAR: {error}") from None
    return dict(loaded)
