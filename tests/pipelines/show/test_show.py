"""The contents of a folder in tables and in a contact sheet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipelines import Feature, write_shards
from pipelines.show import main
from tests.support import numbers, pictures


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    features = (
        Feature(name="image", dtype="uint8", shape=(None, None, 3), encoding="png"),
        Feature(name="label", dtype="int64", encoding="list", label_names=("cat", "dog", "eel")),
        Feature(name="is", dtype="bool", shape=(2,), encoding="list", label_names=("big", "small")),
        Feature(name="text", dtype="string", encoding="bytes"),
    )
    examples = (
        {"image": pictures.encoded(i), "label": i % 2, "is": [i < 2, True], "text": f"text {i}"}
        for i in range(7)
    )
    write_shards(examples, tmp_path / "data", features, num_shards=2, source="pictures")
    return tmp_path / "data"


def test_tables_list_features_and_label_counts(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder), "--to", str(tmp_path / "sheet.png")]) == 0
    lines = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert ["image", "uint8", "?", "x", "?", "x", "3", "png"] in lines
    assert ["text", "text", "0"] in lines
    assert ["cat", "4", "57.1%"] in lines
    assert ["dog", "3", "42.9%"] in lines
    assert ["eel", "0", "0.0%"] in lines
    assert ["big", "2", "28.6%"] in lines
    assert ["7", "images:", f"{tmp_path}/sheet.png"] in lines


@pytest.mark.parametrize(
    ("flags", "name"), [([], "data.png"), (["--out", "sheet.png"], "sheet.png")], ids=str
)
def test_contact_sheet_is_beside_the_data_or_where_asked(
    flags: list[str], name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    assert main([str(folder), "--num-images=1", *flags]) == 0
    assert {path.name for path in folder.parent.iterdir()} == {"data", name}


def test_contact_sheet_shows_each_image(folder: Path, tmp_path: Path) -> None:
    assert main([str(folder), "--to", str(tmp_path / "sheet.png"), "--num-images", "4"]) == 0
    with Image.open(tmp_path / "sheet.png") as sheet:
        pixels = np.asarray(sheet)
    # The middle of each cell: images 0 to 3, which turns of the two shards put in order.
    middles = [pixels[70 + 152 * (i // 2), 70 + 134 * (i % 2)] for i in range(4)]
    assert [int(middle[0]) for middle in middles] == [0, 1, 2, 3]
    assert all(abs(int(middle[2]) - 128) < 3 for middle in middles)


def test_dark_arrays_are_brightened(tmp_path: Path) -> None:
    features = [Feature(name="image", dtype="uint8", shape=(4, 4))]
    examples = ({"image": np.full((4, 4), i + 1)} for i in range(2))
    write_shards(examples, tmp_path / "data", features, num_shards=1, source="dark")
    assert main([str(tmp_path / "data"), "--to", str(tmp_path / "sheet.png")]) == 0
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert (sheet.getpixel((70, 70)), sheet.getpixel((204, 70))) == ((128,) * 3, (255,) * 3)


def test_folder_without_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    features = [Feature(name="x", dtype="float32", shape=(3,), encoding="list")]
    write_shards([{"x": [1, 2, 3]}], tmp_path / "data", features, num_shards=1, source="numbers")
    assert main(["data"]) == 0
    out = capsys.readouterr().out
    assert "[1., 2., 3.]" in out
    assert "The data contain no images to show" in out
    assert not list(tmp_path.glob("*.png"))


def test_damaged_record_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = numbers.write(tmp_path / "data", num_records=4, num_shards=1)
    path = numbers.damage_first_record(tmp_path / "data", index)
    assert main([str(tmp_path / "data")]) == 1
    assert f"error: {path}: record at byte 0: checksum" in capsys.readouterr().err
