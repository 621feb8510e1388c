"""Columns are read as what they are, and the account says as what and why."""

from __future__ import annotations

import contextlib
import decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from pipelines import DataError
from pipelines.sources import open_source, types
from pipelines.sources.source import Options
from tests.support import opened


def column(path: Path, **options: Any) -> tuple[list[Any], str]:
    """Returns the values of the first column of a table, and what it was read as and why."""
    source = open_source(str(path), "auto", Options(**options))
    values = [next(iter(row.values())) for row in source.examples(range(len(source)))]
    reading = source.readings[0]
    return values, f"{reading.kind}: {reading.why}" + (" (a guess)" if reading.is_guess else "")


@pytest.mark.parametrize(
    ("text", "values", "reading"),
    [
        ("a,b\n1,\n+2,x\n", [1, 2], "integer: all cells are integers"),
        ("a,b\n1,\n2.5,\n1e3,x\n", [1, 2.5, 1000], "number: all cells are numbers"),
        ('a,b\n"1,234",x\n"12",y\n', [1234, 12], "integer: numbers with thousands .* guess"),
        ('a,b\n"1,234.5",x\n', [1234.5], "number: numbers with thousands .* guess"),
        ("a;b\n1.234,5;x\n2,5;y\n", [1234.5, 2.5], "number: numbers with decimal commas .* guess"),
        ('a,b\n"1,5",x\n', [1.5], "number: numbers with decimal commas .* guess"),
        ("a;b\n1 234,5;x\n", [1234.5], "number: numbers with thousands .* guess"),
        ("a,b\n12%,x\n3.5 %,y\n", [12, 3.5], "number: .*percent signs removed .*guess"),
        ("a,b\n00123,x\n99999,y\n", ["00123", "99999"], "text: digits with leading zeros .*guess"),
        ("a,b\n12345678901234567890,x\n", ["12345678901234567890"], "text: integers of more than"),
        ("a,b\nTRUE,x\nfalse,y\n", [True, False], "boolean"),
        ("a,b\n1,x\ninf,y\n", [1, float("inf")], "number: .*, 1 infinite"),
        ("a,b\n$1.50,x\n$2,y\n", [1.5, 2], "number: .*currency signs removed .*guess"),
        ("a,b\n\u22121.5,x\n2,y\n", [-1.5, 2], "number"),
        ("a,b\n03/04/2020,x\n", ["03/04/2020"], "text: dates in another form .*--column.*guess"),
        ("a\n2020-01-02T03Z\n2020-01-02T03\n", ["2020-01-02T03Z", "2020-01-02T03"], "text: dates"),
        ("a,b\n9007199254740993,x\n1.5,y\n", ["9007199254740993", "1.5"], "text: .* 53 bits"),
        ("a,b\n2020-01-02,x\n", ["2020-01-02"], "date: all cells are ISO 8601"),
        ("a,b\nNA,1\n,2\nDE,3\n", ["NA", "", "DE"], "text: .*1 empty cells, 1 without .*'NA'"),
        ("a,b\n1,x\n2,x\noops,x\n", ["1", "2", "oops"], "text: .*a.csv: row 3 below .* 'oops' amo"),
        (",a\n7,x\n3,y\n", ["x", "y"], "text"),
        ("a,\nx,\n", ["x"], "text"),
        ("sep=;\na;b\n1;2\n", [1], "integer"),
        ("a|b\n1|x\n2|y\n", [1, 2], "integer"),
        ("a,b\n'x, y',1\n'z',2\n", ["x, y", "z"], "text"),
        ('a,b\n"x\r\n""y""",1\n', ['x\r\n"y"'], "text"),
        ('a,b\n5" wide,1\nz,2\n', ['5" wide', "z"], "text"),
        ("\ufeff\ufeffa,b\n1,2\n\ufeff3,4\n", [1, 3], "integer"),
        ("a,b\n1\u200b,2\n", [1], "integer"),
        ("a,b\n$1,x\n€2,y\n", ["$1", "€2"], "text"),
        ("a;b\n1.234;x\n5.678;y\n", [1.234, 5.678], "number: .*thousands have points .*guess"),
    ],
)
def test_cells_of_delimited_text(
    text: str, values: list[Any], reading: str, tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text(text, newline="")
    found, why = column(tmp_path / "a.csv")
    assert (found, [*map(type, found)]) == (values, [type(found[0])] * len(values))
    assert pd.Series([why]).str.contains(reading).all(), why


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "utf-16-le", "utf-8-sig", "utf-8"])
def test_encodings(encoding: str, tmp_path: Path) -> None:
    text = "größe,city\n1,Zürich\n2,Genf\n"
    (tmp_path / "a.csv").write_bytes(text.encode(encoding))
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    source = opened.source(tmp_path / "a.csv")
    assert [f.name for f in source.features] == ["größe", "city"]
    assert opened.examples(source)[0]["city"].decode() == "Zürich"
    for whole_files in (False, True):
        lines = opened.examples(opened.source(tmp_path / "a.txt", whole_files=whole_files))
        assert "\n".join(line["text"].decode() for line in lines).strip() == text.strip()


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (
            'a,b\n1,"5 inch\n2,x\n',
            {},
            "line 2 begins a quoted cell that never ends; .*--quote none",
        ),
        ('a,b\n"5 inch,x\n2,y\n"7 inch,z\n', {}, "line 2 has text after a closing quote"),
        ("a,a\n1,2\n", {}, "a.csv: has several columns 'a'"),
        ("a,b\n1,x\nabc,y\n", {"column": ("a=integer",)}, "row 2 below .* 'a': .*--column.*'abc'"),
        ("a,b\n1,x\n", {"column": ("c=text",)}, "--column: expected one of a, b, got 'c'"),
        ("a,b\n1,x\n", {"column": ("a=int",)}, "--column: expected NAME=TYPE .* got 'a=int'"),
        ("a,b\n1,x\n", {"encoding": "no"}, "--encoding: expected an encoding"),
        ("a,b\n1,x\n", {"delimiter": ", "}, "--delimiter: expected one ASCII character"),
        ("a,b\n1,é\n", {"encoding": "ascii"}, "a.csv: 'ascii' codec can't decode .*--encoding"),
        ("é,b\n".encode() + "é,é\n".encode() * 9 + b"\xff,b\n", {}, "byte 59 is not UTF-8, alth"),
        ("a\nhello, you\n", {}, "Row #2: Expected 1 columns, got 2"),
        ("t,v\ns,m/s\n1,2\n3,4\n", {}, "row 1 below the header has 's' in .*--column t=text"),
        ("# by me, v1\na,b\n1,2\n3,4\n", {}, "row 1 below .* has 'a' in column '# by me'"),
        ("1::7::5\n1::8::3\n", {}, "'::' seems to divide the cells; replace it by a tab"),
        ('a, b\n1, "x"\n', {}, "has spaces between ',' and '\"', which would become part"),
        ("a,b\n,1\n2,\n", {"drop_gaps": True}, "each row has an empty cell"),
    ],
)
def test_invalid_files_are_named(
    data: str | bytes, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(DataError, match=message):
        column(tmp_path / "a.csv", **options)


def test_overrides(tmp_path: Path) -> None:
    text = "d;n;z;f\n31.12.2020;1,5;7;yes\n01.01.2021;;8;no\n"
    (tmp_path / "a.csv").write_text(text)
    given = ("d=date:%d.%m.%Y", "n=float32", "n=decimal-comma", "z=ignore", "f=boolean")
    source = opened.source(tmp_path / "a.csv", column=given, fill=("n=0",))
    rows = opened.examples(source)
    assert [[*row.values()] for row in rows] == [[b"2020-12-31", 1.5, True], [b"2021-01-01", 0, 0]]
    (tmp_path / "b.tsv").write_text('a\tb\n1\t"5 inch\n2\tx\n')
    rows = opened.examples(opened.source(tmp_path / "b.tsv", quote="none"))
    assert [row["b"] for row in rows] == [b'"5 inch', b"x"]


def test_parts_are_one_table(tmp_path: Path) -> None:
    """Types are those of all parts, columns may be in any order, and folders are columns."""
    for folder, text in (("species=cat", "a,b\n1,x\n"), ("species=big%20dog", "b,a\ny,2.5\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "part.csv").write_text(text)
    rows = opened.examples(opened.source(tmp_path))
    assert [[*row.values()] for row in rows] == [[b"y", 2.5, b"big dog"], [b"x", 1, b"cat"]]
    (tmp_path / "c" / "month=07").mkdir(parents=True)
    for cell, problem in (("7", None), ("8", "in a folder month=07, and has other values")):
        (tmp_path / "c" / "month=07" / "part.csv").write_text(f"a,month\n1,{cell}\n")
        with pytest.raises(DataError, match=problem) if problem else contextlib.nullcontext():
            opened.source(tmp_path / "c")


def test_types_of_parquet_and_pandas(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": [1.5, 2.5, 3.5], "s": pd.Categorical(["lo", "hi", "lo"])})
    frame.sample(frac=1, random_state=0).to_parquet(tmp_path / "shuffled.parquet")
    frame.set_index("s").to_parquet(tmp_path / "named.parquet")
    for name in ("shuffled", "named"):
        source = opened.source(tmp_path / f"{name}.parquet")
        wanted = pd.read_parquet(tmp_path / f"{name}.parquet")
        assert [f.name for f in source.features] == [*wanted.columns]
    columns = {
        "price": pa.array([decimal.Decimal("1.10"), decimal.Decimal("2.25")]),
        "count": pa.array([decimal.Decimal(1), decimal.Decimal(2)], pa.decimal128(9, 0)),
        "id": pa.array([1, 2**63], pa.uint64()),
        "empty": pa.array([[], []]),
        "pair": pa.array([[1.5, 2.5], [3.5, 4.5]]),
        "nested": pa.array([{"x": 1, "y": "a"}, {"x": 2, "y": "b"}]),
    }
    parquet.write_table(pa.table(columns), tmp_path / "types.parquet")
    source = opened.source(tmp_path / "types.parquet")
    assert opened.features(source) == {
        "price": ("float64", (), "raw"),
        "count": ("int64", (), "list"),
        "id": ("string", (), "bytes"),
        "empty": ("int64", (None,), "list"),
        "pair": ("float64", (2,), "raw"),
        "nested.x": ("int64", (), "list"),
        "nested.y": ("string", (), "bytes"),
    }
    assert [e["id"] for e in opened.examples(source)] == [b"1", b"9223372036854775808"]


def test_json_lines(tmp_path: Path) -> None:
    lines = '{"text": "a", "n": 1, "m": {"k": 2.5}}\n\n{"n": "x", "text": "", "m": {"k": 1}}\n'
    lines += '{"n": 2, "text": "b", "m": {"k": 1}}\n'
    (tmp_path / "a.jsonl").write_text(lines)
    source = open_source(str(tmp_path), "auto", Options())
    assert [*source.examples([0, 1])] == [
        {"text": "a", "n": "1", "m.k": 2.5},
        {"text": "", "n": "x", "m.k": 1.0},
    ]
    assert "row 2 has 'x' among numbers" in types.described(source.readings)
    for text, message in (
        ('{"a": 1}\n{"a": 1\n', "line 2, column 8: not JSON"),
        ("[1]\n", "line 1: expected a JSON object"),
        ('{"a": 1, "a": 2}\n', "line 1 has several fields 'a'"),
        ('{"a": [1]}\n{"a": "x"}\n', "line 1: field 'a' has list"),
        ('{"a": "x"}\n{"a": "\\ud83d"}\n', "line 2: field 'a' has half of a surrogate pair"),
        ('{"a": {"0": 1, "1": 2}}\n', "is a table by columns, as pandas"),
        ('{"a": [1]}\n{"a": [1, null]}\n', "row 2: column 'a' has a list with an empty element"),
    ):
        (tmp_path / "a.jsonl").write_text(text)
        with pytest.raises(DataError, match=message):
            open_source(str(tmp_path), "auto", Options())


def test_account_of_a_table(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("Größe;n\n1,5;1\n2,5;\n;3\n".encode("cp1252"))
    source = open_source(str(tmp_path / "a.csv"), "auto", Options(drop_gaps=True))
    account = str(source.account)
    for line in (
        "rows: 3 found, 1 used, 2 left out",
        "row 2 below the header",
        "columns read as number, numbers with decimal commas, 1 empty cells, a guess: 1 (Größe)",
        "files decoded as cp1252, divided by ';', a guess: 1 (a.csv)",
    ):
        assert line in account
    with pytest.raises(DataError, match=r"--strict: .*decimal commas"):
        source.account.check_strict()
