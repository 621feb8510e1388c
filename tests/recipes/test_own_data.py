"""Which folders `--data` accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import numbers, pictures
from tfdist import data
from tfdist.config import TrainConfig
from tfdist.data.data_set import DataSet
from tfdist.errors import DataError

DATA_SET = DataSet(name="photos", noise={}, num_examples={})


def folder(source: Path, split: str, tmp_path: Path) -> Path:
    config = TrainConfig(data=str(source), data_dir=str(tmp_path / "cache"))
    return data.folder(config, DATA_SET, split)


def test_packed_splits_are_used(tmp_path: Path) -> None:
    for name in ("train", "val"):
        numbers.write(tmp_path / "packed" / name, num_records=4, num_shards=1)
    for source in (tmp_path / "packed", tmp_path / "packed" / "train"):
        assert folder(source, "train", tmp_path) == tmp_path / "packed" / "train"
        assert folder(source, "validation", tmp_path) == tmp_path / "packed" / "val"


def test_one_packed_folder_says_what_is_missing(tmp_path: Path) -> None:
    numbers.write(tmp_path / "packed", num_records=4, num_shards=1)
    with pytest.raises(
        DataError, match=r"this packed folder has only one split; .* needs train and validation"
    ):
        folder(tmp_path / "packed", "train", tmp_path)


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_names_of_the_validation_split(name: str, tmp_path: Path) -> None:
    for split in ("train", name):
        pictures.write_classes(tmp_path / "photos" / split, 2)
    assert list(folder(tmp_path / "photos", "validation", tmp_path).glob("*.tfrecord"))


def test_a_missing_split_is_named_with_those_found(tmp_path: Path) -> None:
    (tmp_path / "photos" / "train").mkdir(parents=True)
    with pytest.raises(DataError, match=r"Found only .*photos/train"):
        folder(tmp_path / "photos", "validation", tmp_path)


def test_a_missing_split_of_images_is_named_alone(tmp_path: Path) -> None:
    pictures.write_classes(tmp_path / "photos" / "train", 2)
    with pytest.raises(DataError, match=r"folders train and validation in it, found only train\."):
        folder(tmp_path / "photos", "validation", tmp_path)


def test_class_folders_without_splits_name_the_recipe_that_divides_them(tmp_path: Path) -> None:
    for label in ("cat", "dog", "eel", "owl"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        (tmp_path / "photos" / label / "1.png").write_bytes(pictures.encoded(1))
    needs = "needs the folders train and validation in it, found cat, dog, eel and 1 others"
    with pytest.raises(DataError, match=rf"{needs}\. .* --recipe image_folder"):
        folder(tmp_path / "photos", "train", tmp_path)
