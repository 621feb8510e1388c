"""CelebA in its published layout, in a small version."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipelines import DataError
from tests.support import opened, pictures

NAMES = ("Bald", "Smiling", "Young")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines, partition = ["6", " ".join(NAMES) + " "], []
    (tmp_path / "img_align_celeba").mkdir()
    for number in range(6):
        name = f"{number + 1:06d}.jpg"
        image = pictures.encoded(number * 10, "jpeg", height=218, width=178)
        (tmp_path / "img_align_celeba" / name).write_bytes(image)
        values = ["1" if number >> bit & 1 else "-1" for bit in range(3)]
        lines.append(f"{name}  {'  '.join(values)}")
        partition.append(f"{name} {max(0, number - 3)}")
    (tmp_path / "list_attr_celeba.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "list_eval_partition.txt").write_text("\n".join(partition) + "\n")
    return tmp_path


def test_splits_and_attributes(folder: Path) -> None:
    for split, numbers in (
        ("train", [0, 1, 2, 3]),
        ("validation", [4]),
        ("test", [5]),
        ("all", [*range(6)]),
    ):
        source = opened.source(folder, split=split)
        assert opened.features(source)["attributes"] == ("bool", (3,), "list")
        assert source.features[1].label_names == NAMES
        for number, example in zip(numbers, opened.examples(source), strict=True):
            assert example["file"] == b"%06d.jpg" % (number + 1)
            np.testing.assert_array_equal(
                example["attributes"], [number >> bit & 1 for bit in range(3)]
            )
            assert example["image"].shape == (218, 178, 3)
            assert abs(int(example["image"][0, 0, 0]) - number * 10) < 4


def test_unknown_split_raises(folder: Path) -> None:
    with pytest.raises(DataError, match="--split: expected train, validation, test or all"):
        opened.source(folder, split="val")


def test_missing_image_is_named(folder: Path) -> None:
    (folder / "img_align_celeba" / "000002.jpg").unlink()
    with pytest.raises(DataError, match=r"000002\.jpg: listed in list_attr_celeba\.txt, but"):
        opened.examples(opened.source(folder))


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("eval_partition", lambda text: None, "assigns images to splits"),
        (
            "attr_celeba",
            lambda text: text.replace("000003.jpg  -1", "000003.jpg  0"),
            "line 5: expected a file and 3 values of 1 or -1",
        ),
        (
            "attr_celeba",
            lambda text: text.rstrip().rpartition("\n")[0],
            "must be the number of images, 5; the file may be truncated",
        ),
    ],
)
def test_missing_and_damaged_lists_raise(
    folder: Path, file: str, damage: Callable[[str], str | None], message: str
) -> None:
    path = folder / f"list_{file}.txt"
    text = damage(path.read_text())
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=message):
        opened.source(folder)
