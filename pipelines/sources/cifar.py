"""CIFAR-10 and CIFAR-100 as their author publishes them, in the binary or the Python version.

Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html describes both layouts. `--split` is
`train` (the default) or `test`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipelines.errors import DataError
from pipelines.format.feature import Feature
from pipelines.sources.cifar_pickle import unpickled
from pipelines.sources.source import Example, Options, Source, fingerprint

OPTIONS = frozenset({"split"})
_PIXELS = 3 * 32 * 32


class _Layout(NamedTuple):
    """The files of one version: images by split, label names, and the labels of an image."""

    train: tuple[str, ...]
    test: str
    names: dict[str, str]  # feature: file (binary) or key in `meta` (Python)
    meta: str | None = None  # of the Python versions
    keys: tuple[str, ...] = ()  # of the labels in a batch, in the order of `names`


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
    """Whether the location is the unpacked archive of one of the versions."""
    return _layout(Path(location)) is not None


class Cifar(Source):
    """Images `uint8 (32, 32, 3)` with their label, of CIFAR-100 the coarse one as well."""

    def __init__(self, folder: Path, layout: _Layout, split: str) -> None:
        names = layout.train if split == "train" else (layout.test,)
        self._files, self._layout = [folder / name for name in names], layout
        self._rows: np.ndarray | None = None
        self._length = len(self._loaded())
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
            row = self._loaded()[number]
            labels = {name: row[i] for i, name in enumerate(self._layout.names)}
            yield {"image": row[-_PIXELS:].reshape(3, 32, 32).transpose(1, 2, 0), **labels}

    def __getstate__(self) -> dict[str, object]:
        """Every worker process loads the images itself."""
        return self.__dict__ | {"_rows": None}

    def _loaded(self) -> np.ndarray:
        """Labels and pixels of each image in a row, as the binary version has them."""
        if self._rows is None:
            self._rows = np.concatenate([_rows(file, self._layout) for file in self._files])
        return self._rows


def open_source(location: str, options: Options) -> Source:
    """Opens one split.

    Raises:
        DataError: no such split, or no such layout.
    """
    split = options.split or "train"
    if split not in ("train", "test"):
        raise DataError(f"--split: expected train or test, got {split!r}")
    layout = _layout(Path(location))
    if layout is None:
        raise DataError(f"{location}: no batches of CIFAR here; name the folder that holds them")
    return Cifar(Path(location), layout, split)


def _layout(folder: Path) -> _Layout | None:
    for layout in _LAYOUTS:
        names = [*layout.train, layout.test, layout.meta or next(iter(layout.names.values()))]
        if all((folder / name).is_file() for name in names):
            return layout
    return None


def _label_names(folder: Path, layout: _Layout) -> dict[str, tuple[str, ...]]:
    if layout.meta is not None:
        meta = unpickled(folder / layout.meta)
        return {name: tuple(meta[key]) for name, key in layout.names.items()}
    return {
        name: tuple((folder / file).read_text("utf-8").split())
        for name, file in layout.names.items()
    }


def _rows(file: Path, layout: _Layout) -> np.ndarray:
    if layout.meta is not None:
        batch = unpickled(file)
        labels = [np.array(batch[key], np.uint8)[:, None] for key in layout.keys]
        return np.concatenate([*labels, batch["data"]], axis=1)
    row_bytes = len(layout.names) + _PIXELS
    if (size := file.stat().st_size) % row_bytes:
        raise DataError(f"{file}: expected images of {row_bytes} bytes, got {size} bytes; cut off?")
    return np.fromfile(file, np.uint8).reshape(-1, row_bytes)
