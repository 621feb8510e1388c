"""Splits are recognized by the names of folders and files, and are never classes or one heap."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import pipelines
from pipelines import DataError
from pipelines.sources import open_source
from pipelines.sources.source import Options
from tests.support import opened, pictures


def write(folder: Path, *names: str) -> Path:
    """Writes files: two images into each folder, a line into `.txt`, rows into `.npy`."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".npy"):
            np.save(path, np.arange(6))
        elif name.endswith(".txt"):
            path.write_text("one\n")
        else:
            path.mkdir(exist_ok=True)
            for i in range(2):
                (path / f"{i}.png").write_bytes(pictures.encoded(i))
    return folder


def classes(folder: Path, **options: str) -> tuple[str, ...]:
    labels = [f for f in opened.source(folder, **options).features if f.name == "label"]
    return labels[0].label_names


@pytest.mark.parametrize(
    ("train", "other", "split"),
    [
        ("train", "val", "validation"),
        ("Train", "Test", "test"),
        ("Training", "Testing", "test"),
        ("TRAIN", "dev", "validation"),
        ("train2017", "val2017", "validation"),
        ("seg_train", "seg_test", "test"),
        ("photos/training_set", "photos/test_set", "test"),
    ],
)
def test_folders_of_splits_are_no_classes(
    tmp_path: Path, train: str, other: str, split: str
) -> None:
    write(tmp_path, f"{train}/cat", f"{train}/dog", f"{other}/cat", f"{other}/dog")
    results = {name: str(path.relative_to(tmp_path)) for name, path in
             pipelines.find_splits(tmp_path).items()}  # fmt: skip
    assert results == {"train": train, split: other}
    with pytest.raises(DataError, match=f"the splits train, {split}; .*--split train or"):
        opened.source(tmp_path)
    assert classes(tmp_path, split="TRAINING") == ("cat", "dog")
    assert len(classes(tmp_path, splits="none")) == (1 if train.startswith("photos") else 2)


def test_class_called_train_beside_others_is_a_class(tmp_path: Path) -> None:
    write(tmp_path, "bus", "car", "train")
    assert classes(tmp_path) == ("bus", "car", "train")
    write(tmp_path, "test")
    with pytest.raises(DataError, match="train, test beside bus, car; pass --splits train=train,"):
        classes(tmp_path)
    assert classes(tmp_path, splits="none") == ("bus", "car", "test", "train")


def test_single_split_folder_is_no_class(tmp_path: Path) -> None:
    write(tmp_path, "Train/cat", "Train/dog")
    assert classes(tmp_path) == ("cat", "dog")


def test_splits_within_classes_divide_each_class(tmp_path: Path) -> None:
    write(tmp_path, "cat/train", "cat/test", "dog/train", "dog/test")
    with pytest.raises(DataError, match="contains the splits train, test"):
        classes(tmp_path)
    source = opened.source(tmp_path, split="test")
    assert [e["file"][4:8] for e in opened.examples(source)] == [b"test"] * 4


def test_names_given_by_the_user_overrule(tmp_path: Path) -> None:
    write(tmp_path, "Trn/cat", "Trn/dog", "Tst/cat", "Tst/dog", "extra/cat")
    assert classes(tmp_path) == ("Trn", "Tst", "extra")
    assert classes(tmp_path, splits="train=Trn,test=Tst", split="test") == ("cat", "dog")
    for splits in ("train=Nothing", "train"):
        with pytest.raises(DataError, match="--splits: "):
            classes(tmp_path, splits=splits)
    with pytest.raises(DataError, match="--split: expected train or test, got 'dev'"):
        classes(tmp_path, splits="train=Trn,test=Tst", split="dev")


@pytest.mark.parametrize(
    ("names", "num_test"),
    [
        (("train.txt", "test.txt"), 1),
        (("data/train-00000-of-00002.txt", "data/train-00001-of-00002.txt",
          "data/test-00000-of-00001.txt"), 1),
        (("x_train.npy", "y_train.npy", "x_test.npy", "y_test.npy"), 6),
        (("train/x.npy", "test/x.npy"), 6),
    ],
)  # fmt: skip
def test_files_of_splits_are_not_merged(
    tmp_path: Path, names: tuple[str, ...], num_test: int
) -> None:
    write(tmp_path, *names)
    with pytest.raises(DataError, match="contains the splits train, test; pack each one"):
        opened.source(tmp_path)
    assert len(opened.source(tmp_path, split="test")) == num_test


def test_account_names_the_other_splits(tmp_path: Path) -> None:
    write(tmp_path / "photos", "train/cat", "train/dog", "test/cat", "readme.txt")
    pipelines.pack_dataset(str(tmp_path / "photos"), tmp_path / "out", split="train", num_workers=1)
    fates = pipelines.load_account(tmp_path / "out").kinds["files"]
    assert (fates.found, fates.used) == (7, 4)
    assert fates.left_out["not in the split train"].examples == [
        "readme.txt", "test/cat/0.png", "test/cat/1.png"
    ]  # fmt: skip


@pytest.mark.parametrize("names", ["{split}/{cls}/1.txt", "{cls}/{split}/1.txt", "table"])
def test_a_number_means_the_same_class_in_all_splits(names: str, tmp_path: Path) -> None:
    options = {}
    for split, of_split in (("train", "abc"), ("test", "ac")):
        if names == "table":
            rows = "".join(f"{i},{cls}\n" for i, cls in enumerate(of_split))
            (tmp_path / f"{split}.csv").write_text(f"x,label\n{rows}")
            options["label"] = "label"
        else:
            write(tmp_path, *(names.format(split=split, cls=cls) for cls in of_split))
    assert classes(tmp_path, split="test", **options) == ("a", "b", "c")
    test = opened.source(tmp_path, split="test", **options)
    assert [example["label"] for example in test.examples([0, 1])] == [0, 2]
    account = open_source(str(tmp_path), "auto", Options(split="test", **options)).account
    assert "classes have examples in other splits only: 1 (b)" in str(account)


def test_empty_folders_and_classes_that_look_alike_are_named(tmp_path: Path) -> None:
    alike = ("Cat", "cat", "caf\u00e9", "cafe\u0301")
    write(tmp_path, *(f"{name}/1.txt" for name in (*alike, "dog")))
    (tmp_path / "fish").mkdir()
    account = open_source(str(tmp_path), "auto", Options()).account
    assert "left out, without files: 1 (fish)" in str(account)
    assert "differ from others only in case, spaces or Unicode form, a guess: 4" in str(account)
