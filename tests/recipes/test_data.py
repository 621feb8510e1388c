"""Schedules and data of the recipes, and which folders `--data` accepts."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from recipes import cifar10_resnet, gpt_text, imagenet_resnet50, xception_cats
from tests.recipes.running import SMALL
from tests.support import numbers, pictures
from tfdist import data, schedules
from tfdist.config import TrainConfig
from tfdist.data.data_set import DataSet
from tfdist.errors import DataError
from tfdist.run import flags, from_config, recipe

DATA_SET = DataSet(name="photos", noise={}, num_examples={})


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("data"))


def parse(name: str, *more: str) -> TrainConfig:
    return flags.parse("", "", [f"--recipe={name}", *more])


def test_schedule_of_the_one_hour_paper() -> None:
    """The rate at an epoch, of 1,281,167 images in batches of 8,192."""
    config = parse("imagenet_resnet50", "--batch-size=8192")
    steps = -(-1_281_167 // 8192)
    rate = schedules.learning_rate(config, steps)
    at = {epoch: float(rate(round(epoch * steps))) for epoch in (0, 2.5, 5, 29.9, 30, 60, 80, 89)}
    wanted = {0: 0.1, 2.5: 1.65, 5: 3.2, 29.9: 3.2, 30: 0.32, 60: 0.032, 80: 0.0032, 89: 0.0032}
    np.testing.assert_allclose([*at.values()], [*wanted.values()], rtol=0.01)
    small = parse("imagenet_resnet50", "--model=cnn", "--set=image_size=16")
    assert (small.epochs, small.batch_size, schedules.peak(small)) == (90, 256, 0.1)
    optimizer = imagenet_resnet50.build_model(small, 5005).optimizer
    assert (optimizer.momentum, optimizer.decay) == (0.9, 1e-4)


def test_schedule_of_cifar() -> None:
    config = parse("cifar10_resnet")
    rate = schedules.learning_rate(config, 391)
    assert [round(float(rate(step)), 5) for step in (0, 32_000, 32_100, 48_200, 64_000)] == [
        0.1, 0.1, 0.01, 0.001, 0.001
    ]  # fmt: skip
    assert cifar10_resnet.build_model(config, 391).count_params() == 274_042


def test_synthetic_data_have_the_size_of_the_real_data() -> None:
    small = ["--data=synthetic", "--batch-size=64", "--set=image_size=16"]
    batches = imagenet_resnet50.train_data(parse("imagenet_resnet50", *small))
    assert recipe.num_steps(batches) == 1_281_167 // 64
    images, labels = next(iter(batches))
    assert (images.shape, images.dtype) == ((64, 16, 16, 3), tf.uint8)
    np.testing.assert_equal(labels.numpy().sum(-1), 1)
    again = next(iter(imagenet_resnet50.train_data(parse("imagenet_resnet50", *small))))
    np.testing.assert_equal(images.numpy(), again[0].numpy())
    assert "to measure speed only" in data.describe(parse("imagenet_resnet50", *small))


def test_missing_data_suggest_small_or_synthetic(tmp_path: Path) -> None:
    config = parse("cifar10_resnet", f"--data={tmp_path}/nothing", f"--data-dir={tmp_path}")
    strategy = from_config.make_strategy(config)
    with pytest.raises(DataError, match=r"no such file or folder.*\nUse --data small or synth"):
        from_config.make_data(config, recipe.find("cifar10_resnet"), strategy)


def test_user_folders_are_read_or_packed(data_dir: str, tmp_path: Path) -> None:
    """A folder that is packed is read; one that is not is packed where the data are kept."""
    config = parse("xception_cats", "--data=small", f"--data-dir={data_dir}", "--batch-size=8")
    before = xception_cats.validation_data(config)
    packed = parse("xception_cats", f"--data={data_dir}/cats/small", "--batch-size=8")
    after = xception_cats.validation_data(packed)
    for one, other in zip(before.take(2), after.take(2), strict=True):
        np.testing.assert_equal(one[0].numpy(), other[0].numpy())
    for split in ("train", "validation"):
        (tmp_path / "own" / split).mkdir(parents=True)
        (tmp_path / "own" / split / "a.txt").write_text("some words of mine\n" * 20)
    mine = [f"--data={tmp_path}/own", f"--data-dir={tmp_path}", "--set=length=9", "--batch-size=2"]
    tokens, following = next(iter(gpt_text.validation_data(parse("gpt_text", *mine))))
    assert bytes(tokens.numpy()[0].astype("uint8")) == b"some word"
    assert bytes(following.numpy()[0].astype("uint8")) == b"ome words"
    assert (tmp_path / "text").is_dir()


def test_backbone_is_trained_only_after_unfreezing(data_dir: str) -> None:
    given = [*SMALL["xception_cats"], "--set=backbone_rate=0.01", f"--data-dir={data_dir}"]
    config = parse("xception_cats", *given)
    keras.utils.set_random_seed(0)
    model = xception_cats.build_model(config, 2)
    rows = xception_cats.train_data(config).take(2)
    states = [model.get_layer("backbone").get_weights()]
    for epoch in (0, 1):
        model.fit(
            rows, verbose=0, initial_epoch=epoch, epochs=epoch + 1,
            callbacks=xception_cats.callbacks(config),
        )  # fmt: skip
        states.append(model.get_layer("backbone").get_weights())
    for before, frozen in zip(states[0], states[1], strict=True):
        np.testing.assert_equal(before, frozen)
    assert all((one != other).any() for one, other in zip(*states[1:], strict=True))


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
