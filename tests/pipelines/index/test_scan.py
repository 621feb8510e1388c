"""Existing shards get an index of their contents, or an error with the reason."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import pipelines
from pipelines.format import offsets
from pipelines.index.__main__ import main
from tests.support import by_hand, numbers, pictures


def index(folder: Path, *flags: str) -> int:
    return main([str(folder), "--num-workers", "1", *flags])


def features(folder: Path) -> dict[str, tuple[object, ...]]:
    result = pipelines.load_index(folder).features
    return {f.name: (f.dtype, f.shape, f.encoding) for f in result}


RECORDS = [
    by_hand.example(
        label=[i], pair=[0.5, 1.5], vector=[*range(i % 3)], text=[b"t"], image=[pictures.encoded(i)]
    )
    for i in range(6)
]


def test_error_of_a_damaged_index_names_the_fix(tmp_path: Path) -> None:
    by_hand.write(tmp_path / "a-0.tfrecord", RECORDS)
    assert index(tmp_path) == 0
    damaged = tmp_path / "index.json"
    damaged.write_text(damaged.read_text()[:-40])
    with pytest.raises(pipelines.DataError, match="delete it and create it again") as error:
        pipelines.load_index(tmp_path)
    assert str(error.value).endswith(f"python -m pipelines.index {tmp_path}")
    damaged.unlink()
    assert index(tmp_path) == 0
    assert pipelines.load_index(tmp_path).num_records == len(RECORDS)


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
def test_features_are_inferred(tmp_path: Path, compression: str) -> None:
    by_hand.write(tmp_path / "a-0.tfrecord", RECORDS[:4], compression)
    by_hand.write(tmp_path / "a-1.tfrecord", RECORDS[4:], compression)
    assert index(tmp_path) == 0
    # Without offsets, the first reader would scan the shards a second time.
    assert (tmp_path / offsets.OFFSETS_NAME).exists() == (not compression)
    assert features(tmp_path) == {
        "image": ("uint8", (20, 24, 3), "png"),
        "label": ("int64", (), "list"),
        "pair": ("float32", (2,), "list"),
        "text": ("string", (), "bytes"),
        "vector": ("int64", (None,), "list"),
    }
    result = pipelines.load_index(tmp_path)
    assert [shard.num_records for shard in result.shards] == [4, 2]
    assert not offsets.mismatches(tmp_path, result)
    labels = [int(i) for batch in pipelines.read(tmp_path, 4) for i in batch["label"]]
    assert sorted(labels) == list(range(6))


def test_images_of_several_sizes_and_kinds(tmp_path: Path) -> None:
    images = [pictures.encoded(1), pictures.encoded(2, width=9)]
    by_hand.write(tmp_path / "a.tfrecord", [by_hand.example(image=[i]) for i in images])
    assert index(tmp_path) == 0
    assert features(tmp_path)["image"] == ("uint8", (None, None, 3), "png")
    (tmp_path / "b").mkdir()
    images.append(pictures.encoded(3, "jpeg"))
    by_hand.write(tmp_path / "b/a.tfrecord", [by_hand.example(image=[i]) for i in images])
    assert index(tmp_path / "b") == 0
    assert features(tmp_path / "b")["image"] == ("string", (), "bytes")


def test_feature_that_some_records_lack(tmp_path: Path) -> None:
    by_hand.write(tmp_path / "a.tfrecord", [by_hand.example(x=[1], y=[2]), by_hand.example(x=[3])])
    assert index(tmp_path) == 0
    assert features(tmp_path) == {"x": ("int64", (), "list"), "y": ("int64", (None,), "list")}
    (batch,) = pipelines.read(tmp_path, 2)
    assert batch["y"].to_list() == [[2], []]


def test_declared_features_replace_inferred_ones(tmp_path: Path) -> None:
    by_hand.write(tmp_path / "a.tfrecord", [by_hand.example(x=[bytes(range(6))], label=[1])])
    declared = [
        {"name": "x", "dtype": "uint8", "shape": [2, 3]},
        {"name": "label", "dtype": "int32", "encoding": "list", "label_names": ["a", "b"]},
    ]
    (tmp_path / "features.txt").write_text(json.dumps(declared))
    assert index(tmp_path, "--features", str(tmp_path / "features.txt")) == 0
    (batch,) = pipelines.read(tmp_path, 1)
    assert batch["x"].numpy().tolist() == [[[0, 1, 2], [3, 4, 5]]]
    assert pipelines.load_index(tmp_path).features[0].label_names == ("a", "b")


def test_sets_in_one_folder_get_an_index_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split, records in (("train", RECORDS), ("test", RECORDS[:2])):
        by_hand.write(tmp_path / f"x-{split}.tfrecord-00000-of-00001", records)
    assert index(tmp_path) == 1
    assert "found x-test.tfrecord-*-of-*, x-train.tfrecord" in capsys.readouterr().err
    for split in ("train", "test"):
        flags = ("--files", f"*-{split}*", "--to", str(tmp_path / split))
        assert index(tmp_path, *flags) == 0
    assert pipelines.load_index(tmp_path / "train").num_records == 6
    assert len(list(pipelines.read(tmp_path / "test", 1))) == 2


def test_empty_shards_hold_nothing(tmp_path: Path) -> None:
    by_hand.write(tmp_path / "a-0.tfrecord", RECORDS, "GZIP")
    (tmp_path / "a-1.tfrecord").touch()
    assert index(tmp_path) == 0
    result = pipelines.load_index(tmp_path)
    assert [shard.num_records for shard in result.shards] == [6, 0]
    assert result.compression == "GZIP"


def flipped(folder: Path) -> None:
    data = bytearray(by_hand.write(folder / "a.tfrecord", RECORDS).read_bytes())
    data[20] ^= 1
    (folder / "a.tfrecord").write_bytes(data)


def mixed(folder: Path) -> None:
    by_hand.write(folder / "a-0.tfrecord", RECORDS)
    by_hand.write(folder / "a-1.tfrecord", RECORDS, "GZIP")


def ours(folder: Path) -> None:
    folder.rmdir()
    numbers.write(folder, num_records=4, num_shards=1)


def records(name: str, *contents: bytes) -> Callable[[Path], object]:
    return lambda folder: by_hand.write(folder / name, [*contents])


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            lambda folder: (folder / "a.tfrecord").write_bytes(b"no records at all"),
            "a.tfrecord: not a TFRecord file",
        ),
        (
            records("a.tfrecord", RECORDS[0], b"\xff\xff"),
            "a.tfrecord: record at byte 189: not a tf.train.Example",
        ),
        (flipped, "a.tfrecord: record at byte 0: checksum of its"),
        (
            records("a.tfrecord", by_hand.example(x=[1]), by_hand.example(x=[1.5])),
            "feature 'x' is float_list and int64_list in different records",
        ),
        (
            records("a-00000-of-00002.tfrecord", *RECORDS),
            "a-00000-of-00002.tfrecord: expected 2 shards by its name, found 1",
        ),
        (mixed, "the files have different compressions"),
        (ours, "index.json: exists already; delete it"),
        (
            lambda folder: (folder / "readme.txt").touch(),
            "no file matches '*.tfrec*'; select files with --files",
        ),
        (Path.rmdir, "no such folder; check the path"),
    ],
)
def test_folders_that_cannot_be_indexed(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    write: Callable[[Path], object],
    message: str,
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder)
    assert index(folder) == 1
    errors = capsys.readouterr().err
    assert message in errors
    assert "Traceback" not in errors


def test_images_of_16_bits_are_read_as_such(tmp_path: Path) -> None:
    depth = (np.arange(48).reshape(6, 8) * 1300).astype(np.uint16)
    buffer = io.BytesIO()
    Image.fromarray(depth).save(buffer, "PNG")
    by_hand.write(tmp_path / "a.tfrecord", [by_hand.example(image=[buffer.getvalue()])])
    assert index(tmp_path) == 0
    (batch,) = pipelines.read(tmp_path, 1)
    np.testing.assert_array_equal(batch["image"][0, ..., 0], depth)


@pytest.mark.parametrize("has_context", [True, False])
def test_sequence_examples_are_refused(
    tmp_path: Path, has_context: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    message = tf.train.SequenceExample()
    if has_context:
        message.context.feature["id"].bytes_list.value.append(b"v1")
    message.feature_lists.feature_list["rgb"].feature.add().bytes_list.value.append(b"frame")
    by_hand.write(tmp_path / "a.tfrecord", [message.SerializeToString()])
    assert index(tmp_path) == 1
    assert "record at byte 0: a tf.train.SequenceExample, not a" in capsys.readouterr().err
