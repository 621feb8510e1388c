"""CIFAR in its published layouts, in a small version."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipelines import DataError
from tests.support import opened

PER_FILE = 3
COARSE = ("animal", "vehicle")
FINE = ("cat", "dog", "car")


def pixels(number: int) -> np.ndarray:
    """Images with channels first, as in the files, with different values everywhere."""
    return np.random.default_rng(number).integers(0, 256, (3, 32, 32), np.uint8)


def binary10(folder: Path) -> None:
    (folder / "batches.meta.txt").write_text("\n".join(FINE) + "\n\n")
    for i, name in enumerate([*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]):
        rows = [bytes([n % 3]) + pixels(n).tobytes() for n in numbers(i)]
        (folder / name).write_bytes(b"".join(rows))


def binary100(folder: Path) -> None:
    (folder / "coarse_label_names.txt").write_text("\n".join(COARSE) + "\n")
    (folder / "fine_label_names.txt").write_text("\n".join(FINE) + "\n")
    for i, name in enumerate(["train.bin", "test.bin"]):
        rows = [bytes([n % 2, n % 3]) + pixels(n).tobytes() for n in numbers(i)]
        (folder / name).write_bytes(b"".join(rows))


def python10(folder: Path) -> None:
    dump(folder / "batches.meta", {"label_names": list(FINE)})
    for i, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        dump(folder / name, {"data": data(i), "labels": [n % 3 for n in numbers(i)]})


def python100(folder: Path) -> None:
    dump(folder / "meta", {"fine_label_names": list(FINE), "coarse_label_names": list(COARSE)})
    for i, name in enumerate(["train", "test"]):
        labels = {"fine_labels": [n % 3 for n in numbers(i)]}
        labels |= {"coarse_labels": [n % 2 for n in numbers(i)]}
        dump(folder / name, {"data": data(i), **labels})


def numbers(file: int) -> range:
    return range(file * PER_FILE, (file + 1) * PER_FILE)


def data(file: int) -> np.ndarray:
    return np.stack([pixels(n).ravel() for n in numbers(file)])


def dump(path: Path, value: object) -> None:
    path.write_bytes(pickle.dumps(value, protocol=2))


@pytest.mark.parametrize(
    ("write", "num_train_files"), [(binary10, 5), (binary100, 1), (python10, 5), (python100, 1)]
)
def test_every_published_layout_is_read(
    tmp_path: Path, write: Callable[[Path], None], num_train_files: int
) -> None:
    write(tmp_path)
    for split, first in (("train", 0), ("test", num_train_files * PER_FILE)):
        source = opened.source(tmp_path, split=split)
        assert len(source) == (first or PER_FILE * num_train_files) if first == 0 else PER_FILE
        label_names = {f.name: f.label_names for f in source.features}
        assert label_names["label"] == FINE
        assert label_names.get("coarse_label", COARSE) == COARSE
        for i, example in enumerate(opened.examples(source)):
            np.testing.assert_array_equal(example["image"], pixels(first + i).transpose(1, 2, 0))
            assert example["label"] == (first + i) % 3
            assert example.get("coarse_label", (first + i) % 2) == (first + i) % 2


def test_unknown_split_raises(tmp_path: Path) -> None:
    binary10(tmp_path)
    with pytest.raises(DataError, match="--split: expected train or test, got 'validation'"):
        opened.source(tmp_path, split="validation")


def test_truncated_batch_is_rejected(tmp_path: Path) -> None:
    binary10(tmp_path)
    path = tmp_path / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="expected images of 3073 bytes each, got 9218 bytes"):
        opened.source(tmp_path)


class _Harmful:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("exit 0",)


def test_pickles_run_no_code(tmp_path: Path) -> None:
    python10(tmp_path)
    dump(tmp_path / "data_batch_3", {"data": _Harmful(), "labels": []})
    with pytest.raises(
        DataError, match=r"data_batch_3: not a batch of CIFAR: it refers to .*system"
    ):
        opened.source(tmp_path)


def test_folder_without_batches_raises(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no CIFAR batches found"):
        opened.source(tmp_path, "cifar")
