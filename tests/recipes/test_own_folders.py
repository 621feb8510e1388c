"""Recipes for your own images, texts and tables: splits, classes, errors and pictures."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
from PIL import Image

import pipelines
from pipelines.sources import table_files
from recipes import _class_folders, _settings, image_folder, table
from tfdist import data, models, train
from tfdist.config import TrainConfig
from tfdist.errors import ConfigurationError, DataError
from tfdist.run import flags, recipe

SMALL = data.drawn_images(8, 2, ("a", "b"))


def photos(folder: Path, *classes: str, each: int = 10, suffix: str = "png") -> Path:
    """Writes images of one color per class, and returns the folder."""
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(each):
            pixels = np.full((20, 24, 3), 100 * number + i, np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.{suffix}")
    return folder


def config_for(source: Path, tmp_path: Path) -> TrainConfig:
    return TrainConfig(data=str(source), data_dir=str(tmp_path / "cache"))


def prepare(source: Path, tmp_path: Path) -> _class_folders.ClassFolders:
    return _class_folders.prepare(
        config_for(source, tmp_path), "image_folder", SMALL, kind="images"
    )


def sizes(folders: _class_folders.ClassFolders) -> list[list[int]]:
    pair = folders.train, folders.validation
    return [list(_class_folders.class_counts(f, len(folders.classes))) for f in pair]


def test_every_fifth_of_each_class_is_held_out(tmp_path: Path) -> None:
    result = prepare(photos(tmp_path / "photos", "cat", "dog"), tmp_path)
    assert result.classes == ("cat", "dog")
    assert sizes(result) == [[8, 8], [2, 2]]
    pixels = [
        {int(x) for x in pipelines.read(folder, 1, map_fn=lambda r: r["image"][0, 0, 0]).unbatch()}
        for folder in (result.train, result.validation)
    ]
    assert not pixels[0] & pixels[1]
    assert len(pixels[0] | pixels[1]) == 20


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "files"])
@pytest.mark.parametrize("name", ["validation", "val", "test"])
def test_splits_of_the_folder_are_used(name: str, packed: bool, tmp_path: Path) -> None:
    for split, each in (("train", 3), (name, 2)):
        target = tmp_path / "photos" / split
        source = photos(tmp_path / f"{split}-files" if packed else target, "cat", "dog", each=each)
        if packed:
            pipelines.pack_dataset(str(source), target, num_workers=1)
    for source in (tmp_path / "photos", *([tmp_path / "photos" / "train"] if packed else [])):
        assert sizes(prepare(source, tmp_path)) == [[3, 3], [2, 2]]


def test_names_of_splits_are_recognized_or_chosen(tmp_path: Path) -> None:
    for split, each in (("Training", 3), ("Testing", 2), ("Dev", 1)):
        photos(tmp_path / "photos" / split, "cat", "dog", each=each)
    assert sizes(prepare(tmp_path / "photos", tmp_path)) == [[3, 3], [1, 1]]
    shutil.rmtree(tmp_path / "photos" / "Dev")
    _class_folders._prepare.cache_clear()
    with pytest.raises(DataError, match="pass --set splits=train=Training,validation=Testing, and"):
        prepare(tmp_path / "photos", tmp_path)
    words = ["--set=splits=train=Training,validation=Testing", "--recipe=image_folder"]
    where = [f"--data={tmp_path / 'photos'}", f"--data-dir={tmp_path / 'cache'}"]
    assert sizes(image_folder._folders(flags.parse("", "", words + where))) == [[3, 3], [2, 2]]


def test_classes_too_small_to_hold_out_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"held out for validation \(cat has 2, dog has 2\). Add"):
        prepare(photos(tmp_path / "photos", "cat", "dog", each=2), tmp_path)


def test_recipe_prints_the_account(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = photos(tmp_path / "photos", "cat", "dog", each=5)
    (source / "cat" / "notes.txt").touch()
    prepare(source, tmp_path)
    assert "files: 11 found, 10 used, 1 left out" in capsys.readouterr().out


def test_splits_with_other_classes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    photos(tmp_path / "photos" / "train", "cat", "dog")
    photos(tmp_path / "photos" / "val", "dog", "owl")
    folders = prepare(tmp_path / "photos", tmp_path)
    assert folders.classes == ("cat", "dog", "owl")
    assert sizes(folders) == [[10, 10, 0], [0, 10, 10]]
    account = capsys.readouterr().out
    assert "classes have no examples in train: 1 (owl)" in account
    assert "classes have no examples in validation: 1 (cat)" in account


def test_packed_folder_is_divided(tmp_path: Path) -> None:
    source = photos(tmp_path / "photos", "cat", "dog")
    pipelines.pack_dataset(str(source), tmp_path / "packed", num_workers=1)
    assert sizes(prepare(tmp_path / "packed", tmp_path)) == [[8, 8], [2, 2]]


def test_damaged_record_of_a_packed_folder_is_named(tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    pipelines.pack_dataset(str(photos(tmp_path / "photos", "cat", "dog")), packed, num_workers=1)
    (shard,) = packed.glob("*.tfrecord")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 0xFF
    shard.write_bytes(data)
    with pytest.raises(DataError, match=r"^\S*\.tfrecord: record at byte .* restore the file$"):
        prepare(packed, tmp_path)


def test_changed_files_are_packed_again(tmp_path: Path) -> None:
    source = photos(tmp_path / "photos", "cat", "dog")
    prepare(source, tmp_path)
    photos(source, "owl")
    _class_folders._prepare.cache_clear()
    assert prepare(source, tmp_path).classes == ("cat", "dog", "owl")


def test_key_of_the_cache_follows_files_and_options(tmp_path: Path) -> None:
    """A packed copy is never updated: every change of its source needs another folder."""
    source = photos(tmp_path / "photos", "cat", each=2)
    key, changed = _class_folders._fingerprint, set[str]()
    changed.add(key(source, ("channels", 3)))
    assert key(source, ("channels", 3)) in changed
    changed.add(key(source, ("channels", 1)))
    os.utime(source / "cat" / "0.png", ns=(0, 0))
    changed.add(key(source, ("channels", 3)))
    (source / "cat" / "0.png").rename(source / "cat" / "2.png")
    changed.add(key(source, ("channels", 3)))
    (source / "cat" / "2.png").write_bytes(b"shorter")
    os.utime(source / "cat" / "2.png", ns=(0, 0))
    changed.add(key(source, ("channels", 3)))
    (source / "dog").symlink_to(tmp_path / "photos" / "cat")
    changed.add(key(source, ("channels", 3)))
    assert len(changed) == 6


def test_advice_names_settings_that_recipes_have() -> None:
    """Every option of tables and texts that an error may advise is a setting."""
    for flag in ("column a=text", "encoding NAME", "quote none", "header none", "splits none"):
        name = flag.partition(" ")[0]
        assert _settings.in_settings(f"(--{flag})") == f"(--set {flag.replace(' ', '=', 1)})"
        assert _settings.in_settings(f"a guess: --{name})") == f"a guess: --set {name})"
    unknown = table_files.OPTIONS - set(_settings.TableSettings.model_fields)
    assert not unknown


def test_invalid_class_folders_raise(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--data nowhere: expected a folder with one sub"):
        prepare(Path("nowhere"), tmp_path)
    with pytest.raises(DataError, match="at least 2 classes, found 1"):
        prepare(photos(tmp_path / "one", "cat"), tmp_path)
    for name, second in (("train", "dog"), ("val", "owl")):
        part = photos(tmp_path / name, "cat", second, each=2)
        pipelines.pack_dataset(str(part), tmp_path / "two" / name, num_workers=1)
    with pytest.raises(DataError, match=r"\['cat', 'dog'\], the validation split \['cat', 'owl'\]"):
        prepare(tmp_path / "two", tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit_small", r"'label' has 2 classes \(cat, dog\), and recipe 'vit_small' .* for 1000"),
        ("celeba_attributes", "no feature 'attributes', .* needs 40 of them, found 0"),
        ("unet_segmentation", "no feature 'segmentation_mask', .* needs it"),
    ],
)
def test_recipes_check_features_and_classes(name: str, message: str, tmp_path: Path) -> None:
    for split in ("train", "validation"):
        pipelines.pack_dataset(
            str(photos(tmp_path / "files" / split, "cat", "dog", each=2)),
            tmp_path / "photos" / split,
            num_workers=1,
        )
    config = flags.parse("", "", [f"--recipe={name}", f"--data={tmp_path / 'photos'}"])
    with pytest.raises(DataError, match=message):
        recipe.find(name).train_data(config)


def test_elements_of_a_vector_are_counted() -> None:
    vector = pipelines.Feature(name="attributes", dtype="int64", shape=(3,), encoding="list")
    columns = [vector.model_copy(update={"name": f"attributes/{i}", "shape": ()}) for i in range(3)]
    for features in ([vector], columns):
        data.check_features(features, {"attributes": 3}, "DATA", "USER")
        with pytest.raises(DataError, match=r"has 3 (elements|columns), and USER builds .* for 40"):
            data.check_features(features, {"attributes": 40}, "DATA", "USER")


@pytest.mark.parametrize(("more", "narrow"), [([], " --set width=16"), (["--model=cnn"], "")])
def test_large_images_on_cpus_come_with_advice(
    more: list[str], narrow: str, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--recipe=image_folder", "--data=synthetic", *more]
    image_folder.train_data(flags.parse("", "", common))
    assert capsys.readouterr().err.endswith(f"Quick start: --set image_size=64{narrow}\n")
    image_folder.train_data(flags.parse("", "", [*common, "--set=image_size=64"]))
    assert not capsys.readouterr().err


def test_plots_are_written_and_saved_weights_are_loaded(tmp_path: Path) -> None:
    common = [
        "--recipe=image_folder", "--model=cnn", "--set=filters=[4]", "--set=units=4", "--epochs=1",
        "--set=image_size=16", "--verbose=0", f"--data-dir={tmp_path / 'cache'}", "--batch-size=4",
    ]  # fmt: skip
    source = photos(tmp_path / "photos", "cat", "dog", suffix="jpg")
    (source / "dog" / "0.jpg").rename(source / "dog" / "0.png")  # its content is a JPEG's
    more = [f"--data={source}", f"--run-dir={tmp_path / 'run'}", "--set=class_weights=balanced"]
    assert train.main([*common, *more, "--strategy=mirrored", "--devices=2"]) == 0
    for name in ("confusion_matrix.png", "worst_predictions.png"):
        with Image.open(tmp_path / "run" / name) as picture:
            assert min(picture.size) > 100
    saved = str(tmp_path / "run" / "model.keras")
    config = flags.parse("", "", [*common, "--data=small", f"--set=weights={saved}"])
    model = image_folder.build_model(config, 10)
    before = keras.saving.load_model(saved, compile=False)
    assert (before.output_shape, model.output_shape) == ((None, 2), (None, 3))
    for old, new in zip(before.layers[:-1], model.layers[:-1], strict=True):
        for a, b in zip(old.get_weights(), new.get_weights(), strict=True):
            np.testing.assert_equal(a, b)


def test_class_weights_are_inversely_proportional_to_counts() -> None:
    np.testing.assert_allclose(_class_folders.balanced_weights(np.array([1, 3])), [2.0, 2 / 3])


CSV = "size,color,sold,price,class\n" + "".join(
    f"{i},{'red' if i % 2 else 'blue'},{'true' if i % 3 else 'false'},{i * 1.5},{'ab'[i % 2]}\n"
    for i in range(20)
)


def table_config(tmp_path: Path, *words: str, text: str = CSV) -> TrainConfig:
    (tmp_path / "t.csv").write_text(text)
    return flags.parse("", "", ["--recipe=table", f"--data={tmp_path / 't.csv'}", *words])


def test_columns_of_a_table(tmp_path: Path) -> None:
    config = table_config(tmp_path, "--set=ignore=[sold]", text=CSV.replace("\n7,", "\n,"))
    result = table._table(config)
    assert (result.label, result.classes) == ("class", ("a", "b"))
    assert result.numbers == ("size", "price")
    assert result.texts == {"color": ("blue", "red")}
    assert [len(part["label"]) for part in (result.train, result.validation)] == [16, 4]
    assert np.isfinite(result.train["numbers"]).all()
    model = table.build_model(config, 10)
    (features, labels), *_ = table.validation_data(config)
    assert (model(features).shape, labels.shape) == ((4, 2), (4, 2))


def test_quantity_is_predicted_in_its_own_units(tmp_path: Path) -> None:
    config = table_config(tmp_path, "--set=label=price", "--batch-size=4")
    model = table.build_model(config, 10)
    predicted = np.concatenate([model(x) for x, _ in table.train_data(config)])
    assert abs(predicted.mean() - 14.25) < 15
    assert model.metrics_names[0] == "loss"
    assert table.report(config, model, tmp_path) == ["columns.json"]
    assert json.loads((tmp_path / "columns.json").read_text())["label"] == "price"


@pytest.mark.parametrize(
    ("words", "text", "message"),
    [
        (["--set=label=cost"], CSV, "there is no column 'cost'; columns: size, color"),
        (["--set=task=regression"], CSV, "column 'class' contains text, not numbers"),
        ([], "class\n" + "a\nb\n" * 3, "'class' is the only column"),
        ([], "x,y\n" + "1,only\n" * 9, r"column 'y' has 1 class \['only'\]"),
        (
            [],
            "x,y\n" + "1,2\n" * 9 + "1,\n",
            "'y' has no finite number in 1 rows; .*t.csv: row 10 below",
        ),
        (
            [],
            "x,y\n1,a\ninf,b\n" + "3,b\n" * 3,
            "column 'x' has no finite number in .* row 2 below",
        ),
        ([], "x,y\n1,a\n2\n", r"t\.csv: cannot be read as a table: .*Row #3: Expected 2 col"),
        ([], "x,x,y\n1,2,a\n2,3,b\n", r"t\.csv: has several columns 'x'"),
    ],
    ids=[
        "no-column",
        "text-as-quantity",
        "no-features",
        "one-class",
        "no-label",
        "infinite",
        "ragged",
        "twice",
    ],
)
def test_invalid_tables_raise(words: list[str], text: str, message: str, tmp_path: Path) -> None:
    table._read.cache_clear()
    with pytest.raises((ConfigurationError, DataError), match=message):
        table.train_data(table_config(tmp_path, *words, text=text))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("a", "b"), r"b\.csv: has no column 'x', which .*a\.csv has"),
        (("train", "validation"), r"the validation split has no column 'x'"),
    ],
)
def test_missing_column_is_named(files: tuple[str, str], message: str, tmp_path: Path) -> None:
    (tmp_path / f"{files[0]}.csv").write_text("x,z,y\n1,2,a\n2,3,b\n")
    (tmp_path / f"{files[1]}.csv").write_text("z,y\n1,a\n2,b\n")
    with pytest.raises(DataError, match=message):
        table._read(str(tmp_path), None, "auto", ())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"train": 4}, "has 4 rows, .* every fifth is held out .* at least 5"),
        ({"train": 4, "validation": 0}, "the validation split has no rows"),
        ({"train": 0, "validation": 4}, "the training split has no rows"),
    ],
)
def test_table_without_rows_for_a_split_is_refused(
    rows: dict[str, int], message: str, tmp_path: Path
) -> None:
    for name, number in rows.items():
        (tmp_path / f"{name}.csv").write_text("x,y\n" + "1,a\n2,b\n" * (number // 2))
    with pytest.raises(DataError, match=message):
        table._read(str(tmp_path), None, "auto", ())


def test_text_among_numbers_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = "x,y\n" + "1,a\n2,b\n" * 4, "x,y\n" + "1,a\n2,b\n" * 4 + "oops,a\n"
    (tmp_path / "train.csv").write_text(good)
    (tmp_path / "validation.csv").write_text(bad)
    named = "row 9 below the header has 'oops'"
    with pytest.raises(DataError, match=f"'x' has numbers in one split and text .*{named}"):
        table._read(str(tmp_path), None, "auto", ())
    table._read(str(tmp_path / "validation.csv"), None, "auto", ())
    assert f"{named} among numbers" in capsys.readouterr().out


def test_any_keras_application(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"application": "MobileNetV2"}
    model = models.image_classifier("keras_application", (32, 32, 3), 5, settings, scale=1 / 255)
    assert model.output_shape == (None, 5)
    pixels = np.array([[[[0, 127.5, 255]]]], "float32").repeat(32, 1).repeat(32, 2)
    first = keras.Model(model.input, model.layers[1].output)
    np.testing.assert_allclose(first(pixels)[0, 0, 0], [-1, 0, 1], atol=1e-6)
    with pytest.raises(ConfigurationError, match=r"no such network; .* Did you mean ResNet50V2\?"):
        models.keras_application((32, 32, 3), 5, application="ResNet50V3")

    def offline(*_: object, **__: object) -> None:
        raise Exception("URL fetch failure on https://x.org/a/w_notop.h5: None -- no network")

    monkeypatch.setattr(keras.applications, "MobileNetV2", offline)
    offline.__module__ = "keras.applications.mobilenet_v2"
    with pytest.raises(ConfigurationError) as caught:
        models.keras_application((32, 32, 3), 5, application="MobileNetV2", weights="imagenet")
    assert str(caught.value) == (
        "weights=imagenet: https://x.org/a/w_notop.h5 cannot be downloaded. Copy this file to "
        "~/.keras/models/ by other means, or start from random weights (--set weights=none)."
    )


def test_synthetic_data_of_a_recipe_without_large_data() -> None:
    from tfdist.run import from_config

    config = flags.parse("", "", ["--recipe=mirrored_basics", "--data=synthetic"])
    workload = recipe.find(config.recipe)
    batches, _ = from_config.make_data(config, workload, from_config.make_strategy(config))
    assert recipe.num_steps(batches) == recipe.num_steps(workload.train_data(config))
    first = [rows.numpy() for rows, _ in batches.take(5)]
    np.testing.assert_equal(first[0], first[4])
    assert (first[0] != first[1]).any()


def test_smoke_makes_recipes_smaller() -> None:
    config = flags.parse("", "", ["--recipe=vit_small", "--smoke", "--set=image_size=64"])
    assert (config.batch_size, config.set["size"], config.set["image_size"]) == (16, "micro", 64)
    smaller = recipe.made_smaller(recipe.find("vit_small"), config)
    assert smaller == {"batch_size": 16, "size": "micro", "patch": 8, "randaugment": 1}
    other = flags.parse("", "", ["--recipe=vit_small", "--smoke", "--model=cnn"])
    assert (other.model, other.set["image_size"]) == ("cnn", 32)
    given = flags.parse("", "", ["--recipe=digits", "--smoke", "--batch-size=64"])
    assert given.batch_size == 64
