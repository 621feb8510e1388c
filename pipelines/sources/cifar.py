"""CIFAR-10 and CIFAR-100 as published, in the binary or the Python version.

Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html describes both layouts. `--split` is
`train` (the default) or `test`.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipelines.errors import DataError
from pipelines.format.feature import Feature
from pipelines.sources.source import Example, Options, Source, fingerprint

OPTIONS = frozenset({"split"})
_PIXELS = 3 * 32 * 32


class _Layout(NamedTuple):
    """The files of one version: images by split, label names, and keys of the labels."""

    train: tuple[str, ...]
    test: str
    names: dict[str, str]  # feature: file (binary) or key in `meta` (Python)
    meta: str | None = None  # file with the label names of a Python version
    keys: tuple[str, ...] = ()  # keys of the labels in a batch, in the order of `names`


_LAYOUTS = (
    _Layout(
        tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
        "test_batch.bin",
        {"label": "batches.meta.txt"},
    ),
    _Layout(
        ("train.bin",),
        "test.bin",
        {"coarse_label": "coarse_label_names.txt", "label": "fine_label_names.txt"},
    ),
    _Layout(
        tuple(f"data_batch_{i}" for i in range(1, 6)),
        "test_batch",
        {"label": "label_names"},
        "batches.meta",
        ("labels",),
    ),
    _Layout(
        ("train",),
        "test",
        {"coarse_label": "coarse_label_names", "label": "fine_label_names"},
        "meta",
        ("coarse_labels", "fine_labels"),
    ),
)


def fits(location: str) -> bool:
    """Returns whether the location is the unpacked archive of one of the versions."""
    return _layout(Path(location)) is not None


class Cifar(Source):
    """Images `uint8 (32, 32, 3)` with labels; CIFAR-100 also has coarse labels."""

    def __init__(self, folder: Path, layout: _Layout, split: str) -> None:
        names = layout.train if split == "train" else (layout.test,)
        self._files, self._layout = [folder / name for name in names], layout
        self._length = len(self._images)
        self.features = (
            Feature(name="image", dtype="uint8", shape=(32, 32, 3)),
            *(
                Feature(name=name, dtype="int64", encoding="list", label_names=labels)
                for name, labels in _label_names(folder, layout).items()
            ),
        )
        mark = fingerprint(self._files, folder, contents=True)
        self.description = f"CIFAR, {split}, {self._length} images {mark}"

    def __len__(self) -> int:
        return self._length

    def examples(self, numbers: Sequence[int]) -> Iterator[Example]:
        for number in numbers:
            row = self._images[number]
            labels = {name: row[i] for i, name in enumerate(self._layout.names)}
            yield {"image": row[-_PIXELS:].reshape(3, 32, 32).transpose(1, 2, 0), **labels}

    @functools.cached_property
    def _images(self) -> np.ndarray:
        """One row of labels and pixels per image, in the layout of the binary version."""
        return np.concatenate([_rows(file, self._layout) for file in self._files])


def open_source(location: str, options: Options) -> Source:
    """Opens one split.

    Raises:
        DataError: The split or the layout does not exist.
    """
    split = options.split or "train"
    if split not in ("train", "test"):
        raise DataError(f"--split: expected train or test, got {split!r}")
    layout = _layout(Path(location))
    if layout is None:
        raise DataError(f"{location}: no CIFAR batches found; pass the folder that contains them")
    return Cifar(Path(location), layout, split)


def _layout(folder: Path) -> _Layout | None:
    for layout in _LAYOUTS:
        names = [*layout.train, layout.test, layout.meta or next(iter(layout.names.values()))]
        if all((folder / name).is_file() for name in names):
            return layout
    return None


def _label_names(folder: Path, layout: _Layout) -> dict[str, tuple[str, ...]]:
    if layout.meta is not None:
        meta = _unpickled(folder / layout.meta)
        return {name: tuple(meta[key]) for name, key in layout.names.items()}
    return {
        name: tuple((folder / file).read_text("utf-8").split())
        for name, file in layout.names.items()
    }


def _rows(file: Path, layout: _Layout) -> np.ndarray:
    if layout.meta is not None:
        batch = _unpickled(file)
        labels = [np.array(batch[key], np.uint8)[:, None] for key in layout.keys]
        return np.concatenate([*labels, batch["data"]], axis=1)
    row_bytes = len(layout.names) + _PIXELS
    if (size := file.stat().st_size) % row_bytes:
        raise DataError(
            f"{file}: expected images of {row_bytes} bytes each, got {size} bytes; the file may be "
            "truncated"
        )
    return np.fromfile(file, np.uint8).reshape(-1, row_bytes)


class _ArraysOnly(pickle.Unpickler):
    """Unpickles only arrays, because a pickle could call any function."""

    _ALLOWED = ("_reconstruct", "ndarray", "dtype", "_frombuffer", "scalar")

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "numpy" and name in self._ALLOWED:
            # The files name modules of NumPy 1.
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes for Python 2
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def _unpickled(file: Path) -> dict[str, Any]:
    try:
        # The files were written by Python 2, whose strings are bytes, including array data.
        loaded = _ArraysOnly(io.BytesIO(file.read_bytes()), encoding="latin1").load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError) as error:
        raise DataError(f"{file}: not a batch of CIFAR: {error}") from None
    return dict(loaded)
