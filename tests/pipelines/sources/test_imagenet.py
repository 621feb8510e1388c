"""ImageNet in its published layouts, in a small version."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from pipelines import DataError
from tests.support import opened, pictures

WNIDS = ("n01440764", "n01443537", "n02066245")
#: The development kit counts classes from 1, in an order of its own.
KIT_ORDER = (WNIDS[2], WNIDS[0], WNIDS[1])
TRUTH = (3, 1, 1, 2)
KIT = "ILSVRC2012_devkit_t12/data/"


def train_files() -> dict[str, bytes]:
    names = [f"{wnid}/{wnid}_{i}.JPEG" for wnid in WNIDS for i in range(2)]
    return {name: pictures.encoded(number * 20, "jpeg") for number, name in enumerate(names)}


def val_files() -> dict[str, bytes]:
    return {f"ILSVRC2012_val_{i + 1:08d}.JPEG": pictures.encoded(i * 20, "jpeg") for i in range(4)}


def kit_files() -> dict[str, bytes]:
    dtype = [("ILSVRC2012_ID", "f8"), ("WNID", "O"), ("words", "O")]
    synsets = np.array([(i + 1, wnid, "words") for i, wnid in enumerate(KIT_ORDER)], dtype)
    meta = io.BytesIO()
    savemat(meta, {"synsets": synsets[:, None]})
    truth = "".join(f"{number}\n" for number in TRUTH).encode()
    return {
        KIT + "meta.mat": meta.getvalue(),
        KIT + "ILSVRC2012_validation_ground_truth.txt": truth,
    }


def unpack(files: dict[str, bytes], folder: Path) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def folders(root: Path) -> None:
    unpack(train_files(), root / "train")
    unpack(val_files(), root / "val")
    unpack(kit_files(), root)


def archives(root: Path) -> None:
    of_class = {}
    for wnid in WNIDS:
        images = {n.split("/")[1]: d for n, d in train_files().items() if wnid in n[:9]}
        of_class[f"{wnid}.tar"] = opened.write_tar(root / "class.tar", images).read_bytes()
    (root / "class.tar").unlink()
    opened.write_tar(root / "ILSVRC2012_img_train.tar", of_class)
    opened.write_tar(root / "ILSVRC2012_img_val.tar", val_files())
    opened.write_tar(root / "ILSVRC2012_devkit_t12.tar.gz", kit_files(), "w:gz")


@pytest.mark.parametrize("write", [folders, archives])
def test_images_get_the_classes_of_their_folders_or_of_the_kit(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    write(tmp_path)
    of_kit = [WNIDS.index(KIT_ORDER[number - 1]) for number in TRUTH]
    for split, files, labels in (
        ("train", train_files(), [0, 0, 1, 1, 2, 2]),
        ("validation", val_files(), of_kit),
    ):
        source = opened.source(tmp_path, split=split)
        assert source.features[1].label_names == WNIDS
        assert list(source.examples(range(len(files)))) == [
            {"image": data, "label": label, "file": name.rpartition("/")[2]}
            for (name, data), label in zip(files.items(), labels, strict=True)
        ]


def test_validation_in_class_folders_needs_no_kit(tmp_path: Path) -> None:
    unpack(train_files(), tmp_path / "train")
    unpack({f"{WNIDS[1]}/x.JPEG": pictures.encoded(1, "jpeg")}, tmp_path / "val")
    source = opened.source(tmp_path, split="validation")
    (example,) = opened.examples(source)
    assert source.features[1].label_names[example["label"]] == WNIDS[1]


def test_images_are_resized(tmp_path: Path) -> None:
    archives(tmp_path)
    source = opened.source(tmp_path, image_size="8x8")
    assert {e["image"].shape for e in opened.examples(source)} == {(8, 8, 3)}


def test_damaged_image_in_an_archive_is_named(tmp_path: Path) -> None:
    archives(tmp_path)
    path = tmp_path / "ILSVRC2012_img_val.tar"
    path.write_bytes(path.read_bytes().replace(b"\xff\xd8\xff", b"\x00\x00\x00", 1))
    with pytest.raises(
        DataError, match=r"img_val\.tar: ILSVRC2012_val_00000001\.JPEG: not a readable image"
    ):
        opened.examples(opened.source(tmp_path, split="validation"))


@pytest.mark.parametrize(
    ("remove", "split", "message"),
    [
        ("val", "validation", r"expected val/ or ILSVRC2012_img_val\.tar, found neither"),
        (KIT, "validation", r"are in ILSVRC2012_devkit_t12\.tar\.gz; copy it to"),
        ("val/ILSVRC2012_val_00000002.JPEG", "validation", "lists 4 images, found 3"),
        ("", "test", "--split: expected train or validation, got 'test'"),
    ],
)
def test_missing_files_are_named(tmp_path: Path, remove: str, split: str, message: str) -> None:
    folders(tmp_path)
    if remove:
        (tmp_path / remove).rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=message):
        opened.source(tmp_path, split=split)


def test_damaged_archive_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "ILSVRC2012_img_train.tar").write_bytes(b"no archive" * 100)
    with pytest.raises(DataError, match=r"img_train\.tar: not an archive"):
        opened.source(tmp_path)
