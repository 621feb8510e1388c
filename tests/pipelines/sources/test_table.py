"""Tables as sources: their columns, and images that rows name."""

from __future__ import annotations

import datetime
import gzip
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
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
        ("a,b\n1,x\n,\n3,NA\n", {}, "row 2 below the header: fill"),
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


def test_parts_with_other_types(tmp_path: Path) -> None:
    for name, values in (("a", [1]), ("b", [2]), ("c", ["x"])):
        parquet.write_table(pa.table({"i": values, "j": [1]}), tmp_path / f"{name}.parquet")
    with pytest.raises(DataError, match=r"c\.parquet: column 'i' has string, and .*a\.parquet has"):
        opened.source(tmp_path)
    rows = opened.examples(opened.source(tmp_path, column=("i=text",)))
    assert [row["i"] for row in rows] == [b"1", b"2", b"x"]
    assert len(opened.source(tmp_path, column=("i=ignore",)).features) == 1


def test_unsupported_columns_are_rejected(tmp_path: Path) -> None:
    table = pa.table({"x": pa.array([[[1], [2, 3]]])})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="column 'x': cannot store list"):
        opened.source(tmp_path / "a.parquet")


def test_lists_of_boxes_are_stored(tmp_path: Path) -> None:
    boxes = [[[1, 2, 3, 4.5], [5, 6, 7, 8]], []]
    labels = pa.array([["a", "b"], []], pa.list_(pa.dictionary(pa.int32(), pa.string())))
    parquet.write_table(pa.table({"boxes": boxes, "labels": labels}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"cannot store list.*--column boxes=float32"):
        opened.source(tmp_path)
    source = opened.source(tmp_path, column=("boxes=float32",))
    assert source.features[0].shape == (None, 4)
    rows = list(source.examples([0, 1]))
    assert rows == [{"boxes": b, "labels": n} for b, n in zip(boxes, (["a", "b"], []), strict=True)]


def test_one_object_with_rows_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"data": [{"x": 1}, {"x": 2}]}')
    with pytest.raises(DataError, match="is one object, whose rows are in its field 'data'"):
        opened.source(tmp_path / "a.json")


def test_names_that_are_numbers_may_be_a_row_of_data(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("5.1,a,b,setosa\n4.9,c,d,virginica\n")
    source = open_source(str(tmp_path), "auto", Options())
    ((change, group),) = source.account.kinds["files"].changed.items()
    assert (change, group.guessed) == ("with '5.1' as the name of a column", True)
    for options in (Options(column=("5.1=number",)), Options(header="first")):
        confirmed = open_source(str(tmp_path), "auto", options)
        assert not confirmed.account.kinds["files"].changed


@pytest.mark.parametrize(
    ("text", "first"),
    [("5.1,setosa\n4.9,setosa\n", "5.1"), ("ham,Go\nspam,Free\nham,Ok\n", "ham"), ("1\n2\n", "1")],
)
def test_tables_without_names(text: str, first: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(
        DataError, match=f"is the first row one of data. It has '{first}' as .*none"
    ):
        opened.source(tmp_path)
    wanted = pd.read_csv(tmp_path / "a.csv", header=None).to_numpy().tolist()
    for header, name in (("none", "column_1"), ("x,y"[: len(wanted[0]) * 2 - 1], "x")):
        source = open_source(str(tmp_path), "auto", Options(header=header))
        assert source.features[0].name == name
        assert [[*row.values()] for row in source.examples(range(len(source)))] == wanted
    with pytest.raises(DataError, match=r"a\.csv: row 1: column 'column_1': expected date"):
        opened.source(tmp_path, header="none", column=("column_1=date",))
    pd.DataFrame(np.eye(2)).to_csv(tmp_path / "a.csv", index=False)  # the names are 0 and 1
    assert len(open_source(str(tmp_path), "auto", Options())) == 2


_ROWS = b"a,b\n1,x\n2,\xc3\xa9\n"


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz", "zst", "zip"])
def test_compressed_text(suffix: str, tmp_path: Path) -> None:
    """As pandas, whatever the file is called."""
    frame = pd.DataFrame({"a": [1, 2], "b": ["x", "é"]})
    frame.to_csv(tmp_path / f"a.csv.{suffix}", index=False) if suffix != "zst" else None
    if suffix == "zst":
        with pa.CompressedOutputStream(str(tmp_path / "a.csv.zst"), "zstd") as file:
            file.write(_ROWS)
    rows = opened.examples(opened.source(tmp_path))
    assert [(row["a"], row["b"].decode()) for row in rows] == [(1, "x"), (2, "é")]
    (tmp_path / f"a.csv.{suffix}").rename(tmp_path / "a.txt")
    lines = opened.examples(opened.source(tmp_path), [2, 0])
    assert [line["text"] for line in lines] == [_ROWS.splitlines()[i] for i in (2, 0)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gzip.compress(_ROWS * 99, mtime=0)[:-9], "its compressed data are damaged or cut off"),
        (b"version https://git-lfs.github.com/spec/v1\noid x\n", "is a pointer of Git LFS"),
        (b"<!DOCTYPE html>\n<p>Not found</p>\n", "is a web page"),
        (b"a  b\n1  2\n3  4\n", "spaces seem to divide the cells"),
        (b"a,b\n1,x\na,b\n2,y\n", "row 2 below the header repeats the names"),
        (b"a,b\n1,x\0\n", "not text in a known encoding"),
    ],
)
def test_files_that_are_no_tables(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(data)
    with pytest.raises(DataError, match=message):
        opened.source(tmp_path)


def test_archives_of_several_files_and_workbooks_are_named(tmp_path: Path) -> None:
    for names, message in ((("a", "b"), "contains 2 files"), (["[Content_Types].xml"], "workbook")):
        with zipfile.ZipFile(tmp_path / "a.csv", "w") as archive:
            for name in names:
                archive.writestr(name, _ROWS)
        with pytest.raises(DataError, match=message):
            opened.source(tmp_path)
    for name, message in (("a.tar.gz", "compressed; unpack it"), ("a.xlsx", "a workbook; save")):
        next(tmp_path.iterdir()).rename(tmp_path / name)
        with pytest.raises(DataError, match=f"{name}: is {message}"):
            opened.source(tmp_path)


def test_json_files_are_read_where_nothing_else_is(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.json").write_text(json.dumps([{"a": 1}, {"a": 2}], indent=1))
    assert len(opened.source(tmp_path, split="test")) == len(opened.source(tmp_path / "test.json"))
    (tmp_path / "train.csv").write_text("a\n1\n")
    source = open_source(str(tmp_path), "auto", Options())
    assert source.account.kinds["files"].left_out.popitem()[1].count == 2


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


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_conversations_become_lists(suffix: str, tmp_path: Path) -> None:
    rows = [
        [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "Yes.", "n": i}]
        for i in range(3)
    ]
    rows[1] *= 2
    if suffix == "jsonl":
        lines = [json.dumps({"messages": row}) for row in rows]
        (tmp_path / "a.jsonl").write_text("\n".join(lines))
    else:
        table = pa.table({"messages": rows}).slice(0, 2)
        kind = pa.large_list(table.schema[0].type.value_type)
        parquet.write_table(table.cast(pa.schema({"messages": kind})), tmp_path / "a.parquet")
    source = opened.source(tmp_path, column=("messages.n=ignore",))
    first, second = list(source.examples([0, 1]))
    assert first["messages.content"] == ["0?", "Yes."]
    assert second["messages.role"] == ["user", "assistant"] * 2


def test_image_options_need_images(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1\n")
    with pytest.raises(DataError, match="has no images"):
        opened.source(tmp_path, image_size="4x4")
