"""Tables as sources: their columns, and images that rows name."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from pipelines import DataError
from pipelines.sources import open_source
from pipelines.sources.source import Options
from tests.support import opened, pictures

CSV = "age,height,species,seen\n3,1.5,cat,2020-01-02\n4,2.25,dog,2021-01-02\n5,0.1,cat,\n"


def test_csv_with_class_names(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(CSV.replace(",\n", ",2022-01-02\n"))
    source = opened.source(tmp_path / "a.csv", label="species")
    assert opened.features(source) == {
        "age": ("int64", (), "list"),
        "height": ("float64", (), "raw"),
        "species": ("int64", (), "list"),
        "seen": ("string", (), "bytes"),
    }
    assert source.features[2].label_names == ("cat", "dog")
    result = opened.examples(source, [2, 1])
    assert [e["height"] for e in result] == [0.1, 2.25]
    assert [e["species"] for e in result] == [0, 1]
    assert result[1]["seen"] == b"2021-01-02"


GAPS = "n,word\n1,a\n,b\n3,\n4,NA\n"


def test_empty_cells_are_filled_or_their_rows_dropped(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(GAPS)
    filled = opened.source(tmp_path / "a.csv", fill=("n=-1", "word="))
    rows = [(e["n"], e["word"]) for e in opened.examples(filled)]
    assert rows == [(1, b"a"), (-1, b"b"), (3, b""), (4, b"")]
    both = opened.source(tmp_path / "a.csv", fill=("n=2",), drop_gaps=True)
    assert [(e["n"], e["word"]) for e in opened.examples(both)] == [(1, b"a"), (2, b"b")]
    assert len({filled.description, both.description}) == 2


def test_folder_of_tables_and_tabs(tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"{i}.tsv").write_text(f"x\ty\n{i}\tname {i}\n")
    result = opened.examples(opened.source(tmp_path))
    assert [(e["x"], e["y"]) for e in result] == [(i, b"name %d" % i) for i in range(3)]


def test_parquet_types(tmp_path: Path) -> None:
    columns = {
        "f32": pa.array([0.5, 1.5], pa.float32()),
        "u8": pa.array([1, 255], pa.uint8()),
        "u32": pa.array([1, 2**32 - 1], pa.uint32()),
        "flag": pa.array([True, False]),
        "blob": pa.array([b"\x00\x01", b""], pa.large_binary()),
        "words": pa.array([["a", "b"], []], pa.list_(pa.string())),
        "ints": pa.array([[1], [2, 3]], pa.list_(pa.int32())),
        "pair": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float64(), 2)),
        "kind": pa.array(["x", "y"]).dictionary_encode(),
        "day": pa.array([datetime.date(2020, 1, 2)] * 2),
    }
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    source = opened.source(tmp_path / "a.parquet")
    assert opened.features(source) == {
        "f32": ("float32", (), "list"),
        "u8": ("uint8", (), "list"),
        "u32": ("int64", (), "list"),
        "flag": ("bool", (), "list"),
        "blob": ("string", (), "bytes"),
        "words": ("string", (None,), "bytes"),
        "ints": ("int32", (None,), "list"),
        "pair": ("float64", (2,), "raw"),
        "kind": ("string", (), "bytes"),
        "day": ("string", (), "bytes"),
    }
    first, second = opened.examples(source)
    assert (first["f32"], second["u8"], second["u32"]) == (0.5, 255, 2**32 - 1)
    assert (first["blob"], first["words"].tolist()) == (b"\x00\x01", [b"a", b"b"])
    assert (second["ints"].tolist(), second["words"].tolist()) == ([2, 3], [])
    assert (second["pair"].tolist(), second["kind"], first["day"]) == ([3, 4], b"y", b"2020-01-02")


def test_parquet_by_its_first_bytes(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"x": [1, 2]}), tmp_path / "data.bin")
    source = opened.source(tmp_path / "data.bin", "parquet")
    assert [e["x"] for e in opened.examples(source)] == [1, 2]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            CSV,
            {},
            r"empty cells in column 'seen', row 3 below the header: fill .*--fill seen=VALUE",
        ),
        (
            "a,b\n1,x\n,\n3,NA\n",
            {},
            "row 2 below the header: fill",
        ),
        (CSV, {"fill": ("sen=x",)}, r"--fill: expected one of \['age', 'height'.*got 'sen'"),
        (
            CSV,
            {"fill": ("age=x",)},
            "--fill: expected a value of type int64 for column 'age', got 'x'",
        ),
        ("a,b\n1,\n2,\n", {}, "a.csv: column 'b' is empty in all rows"),
        ("a,b\n1,\n2,\n", {"fill": ("b=1",)}, "column 'b' is empty in all rows"),
        (CSV, {"fill": ("age",)}, "--fill: expected COLUMN=VALUE, got 'age'"),
        ("a,b\n1,2\n3\n", {}, "cannot be read as a table: .*Row #3"),
        ("a\n1\n", {"label": "b"}, r"--label: expected one of \['a'\], got 'b'"),
        ("a\n1\n", {"label": "a"}, "--label: column 'a' contains int64, not class names"),
        ("a\n", {}, "expected rows, found none"),
    ],
)
def test_invalid_tables_are_rejected(
    tmp_path: Path, text: str, options: dict[str, Any], message: str
) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        opened.examples(opened.source(tmp_path / "a.csv", **options))


def test_other_columns_in_one_folder(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a\n1\n")
    (tmp_path / "b.csv").write_text("b\n1\n")
    with pytest.raises(DataError, match=r"b\.csv: has no column 'a', which .*a\.csv has"):
        opened.source(tmp_path)


def test_unsupported_columns_are_rejected(tmp_path: Path) -> None:
    table = pa.table({"x": pa.array([[[1]]], pa.list_(pa.list_(pa.int64())))})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="column 'x': cannot store list"):
        opened.source(tmp_path / "a.parquet")


def test_names_that_are_numbers_may_be_a_row_of_data(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("5.1,setosa\n4.9,setosa\n")
    source = open_source(str(tmp_path), "auto", Options())
    ((change, group),) = source.account.kinds["files"].changed.items()
    assert group.guessed
    assert change.startswith("with '5.1' as the name of a column")
    confirmed = open_source(str(tmp_path), "auto", Options(column=("5.1=number",)))
    assert not confirmed.account.kinds["files"].changed


def test_compressed_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "b.csv.gz").write_bytes(b"any")
    with pytest.raises(DataError, match=r"b\.csv\.gz: is compressed; unpack it first"):
        opened.source(tmp_path)
    (tmp_path / "a.csv").write_text("a\n1\n")
    account = open_source(str(tmp_path), "auto", Options()).account
    assert [*account.kinds["files"].left_out] == ["compressed; unpack it first"]


def test_image_table_of_hugging_face(tmp_path: Path) -> None:
    """Images are structs of bytes and path, and the metadata name the classes."""
    encoded = [pictures.encoded(i) for i in range(3)]
    features = {
        "image": {"_type": "Image"},
        "label": {"_type": "ClassLabel", "names": ["cat", "dog"]},
    }
    table = pa.table(
        {
            "image": [{"bytes": data, "path": f"{i}.png"} for i, data in enumerate(encoded)],
            "label": [0, 1, 0],
        }
    ).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    parquet.write_table(table, tmp_path / "train-00000-of-00001.parquet")
    source = opened.source(tmp_path)
    image, label = source.features
    assert (image.encoding, image.shape) == ("png", (None, None, 3))
    assert (label.encoding, label.label_names) == ("list", ("cat", "dog"))
    assert list(source.examples([2, 1])) == [
        {"image": encoded[2], "label": 0},
        {"image": encoded[1], "label": 1},
    ]
    small = opened.source(tmp_path, image_size="4x4", image_format="jpeg")
    assert small.features[0].shape == (4, 4, 3)
    (example,) = small.examples([0])
    assert bytes(example["image"]).startswith(b"\xff\xd8")  # type: ignore[call-overload]


def test_image_options_need_images(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1\n")
    with pytest.raises(DataError, match="has no images"):
        opened.source(tmp_path, image_size="4x4")
