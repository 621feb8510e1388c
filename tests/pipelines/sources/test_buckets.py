"""Sources in a bucket are packed to the bytes of local sources, and indexed where they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

import pipelines
from pipelines import storage
from pipelines.index.__main__ import main as index
from pipelines.pack.__main__ import main as pack
from tests.support import buckets, numbers, pictures
from tests.support.commands import require_obstore
from tests.support.opened import write_tar

require_obstore()
_numbers_of_folders = itertools.count()


def tars(folder: Path) -> None:
    for tar in range(2):
        members = {}
        for i in range(5 * tar, 5 * tar + 5):
            members |= {f"{i}.png": pictures.encoded(i % 4), f"{i}.cls": b"%d" % i}
        write_tar(folder / f"{tar}.tar", members)


def images(folder: Path) -> None:
    for i in range(6):
        (folder / "ab"[i % 2]).mkdir(exist_ok=True)
        (folder / "ab"[i % 2] / f"{i}.png").write_bytes(pictures.encoded(i % 4))


def table() -> pa.Table:
    rows = [{"bytes": pictures.encoded(i % 4), "path": f"{i}.png"} for i in range(6)]
    return pa.table({"image": rows, "label": list(range(6))})


def parquet_table(folder: Path) -> None:
    parquet.write_table(table(), folder / "train.parquet")


def arrow_stream(folder: Path) -> None:
    """A folder as `datasets` saves it to disk."""
    with pa.ipc.new_stream(folder / "data-00000-of-00001.arrow", table().schema) as stream:
        stream.write_table(table())


def arrays(folder: Path) -> None:
    np.save(folder / "x.npy", np.arange(12.0).reshape(6, 2))
    np.save(folder / "y.npy", np.arange(6))


def text(folder: Path) -> None:
    for i in range(3):
        (folder / f"{i}.txt").write_text("".join(f"line {i} {j}\n" for j in range(5)))


def shards(folder: str) -> dict[str, bytes]:
    """Returns the contents of the shards that were packed."""
    names = [shard.name for shard in pipelines.load_index(folder).shards]
    return {name: (storage.at(folder) / name).read_bytes() for name in names}


@pytest.mark.parametrize("write_to", [tars, images, parquet_table, arrow_stream, arrays, text])
def test_bucket_to_bucket_equals_local(tmp_path: Path, write_to: Callable[[Path], None]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_to(source)
    url = f"memory://bucket/source-{next(_numbers_of_folders)}"
    for path in source.rglob("*"):
        if path.is_file():
            name = path.relative_to(source).as_posix()
            storage.RemotePath(f"{url}/{name}").write_bytes(path.read_bytes())
    options = ["--num-shards", "3", "--num-workers", "1"]
    assert pack([f"file://{source}", str(tmp_path / "packed"), *options]) == 0
    assert pack([url, f"{url}-packed", *options]) == 0
    assert shards(f"{url}-packed") == shards(str(tmp_path / "packed"))
    (first, *_) = sorted(path for path in source.rglob("*") if path.is_file())
    if write_to is not images and write_to is not arrays:
        one = f"{url}/{first.name}"
        assert pack([one, f"{url}-one", "--num-shards", "1", "--num-workers", "1"]) == 0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("memory://bucket/none", "no such file or folder; check the path"),
        ("hf://datasets/a/b", "hf download --repo-type dataset"),
        ("http://host/a.tar", "expected a local path, s3://, gs:// or az://"),
    ],
)
def test_other_urls_are_one_line(
    source: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pack([source, str(tmp_path / "packed")]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_index_of_shards_in_a_bucket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of some of its files, which are copied to the folder of the index."""
    numbers.write(tmp_path / "local", num_records=20, num_shards=2)
    url = f"memory://bucket/shards-{next(_numbers_of_folders)}"
    buckets.upload(tmp_path / "local", url)
    (storage.RemotePath(url) / "index.json").unlink()
    assert index([url, "--num-workers", "1", "--to", f"{url}-indexed"]) == 0
    assert index([url, "--num-workers", "1"]) == 0
    for folder in (url, f"{url}-indexed"):
        assert pipelines.load_index(folder).num_records == 20
        assert len(numbers.order(pipelines.read(folder, 5))) == 20
    assert index([url, "--num-workers", "1"]) == 1
    assert "exists already" in capsys.readouterr().err
    assert index([url, "--to", str(tmp_path / "other")]) == 1
    assert "in the same bucket as DIR" in capsys.readouterr().err
