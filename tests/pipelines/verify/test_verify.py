"""Any damage of a folder is reported with file and byte."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorflow as tf

from pipelines import Feature, load_index, write_shards
from pipelines.format import record_file
from pipelines.format.examples import decode, encode
from pipelines.verify import main
from pipelines.verify import verify as verify_folder
from pipelines.writing import ShardWriter
from tests.support import by_hand, pictures

FEATURES = (
    Feature(name="image", dtype="uint8", shape=(None, None, 3), encoding="png"),
    Feature(name="label", dtype="int64", encoding="list", label_names=("cat", "dog")),
    Feature(name="raw", dtype="int16", shape=(2, 3)),
    Feature(name="boxes", dtype="float32", shape=(None, 4), encoding="list"),
    Feature(name="flag", dtype="bool", encoding="list"),
    Feature(name="text", dtype="string", encoding="bytes"),
)


def example(number: int) -> dict[str, object]:
    return {
        "image": pictures.encoded(number),
        "label": number % 2,
        "raw": [[number] * 3] * 2,
        "boxes": [[0.0, 1.0, 0.5, number]] * (number % 3),
        "flag": number % 2 == 0,
        "text": f"number {number}",
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    examples = map(example, range(12))
    write_shards(examples, tmp_path / "data", FEATURES, num_shards=3, source="pictures")
    return tmp_path / "data"


def verify(folder: Path, *flags: str) -> int:
    return main([str(folder), "--num-workers", "1", *flags])


def shard(folder: Path, number: int = 1) -> Path:
    return folder / load_index(folder).shards[number].name


def replace(folder: Path, records: list[bytes]) -> None:
    """Replaces records, with valid framing."""
    with ShardWriter(shard(folder)) as writer:
        for record in records:
            writer.write(record)


def test_intact_folders_pass(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(folder) == 0
    assert verify(folder, "--decode") == 0
    out, err = capsys.readouterr()
    assert "error" not in err
    assert "12" in out


def test_damaged_records_are_named_and_others_are_read(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = shard(folder)
    starts = list(record_file.offsets(path))
    data = bytearray(path.read_bytes())
    for number in (1, 3):
        data[starts[number] + 30] ^= 1
    path.write_bytes(data)
    assert verify(folder) == 1
    out, err = capsys.readouterr()
    assert [line.split(" bytes of")[0].rpartition(" ")[0] for line in out.splitlines()[:2]] == [
        f"{path}: record at byte {starts[1]}: checksum of its",
        f"{path}: record at byte {starts[3]}: checksum of its",
    ]
    assert f"error: {folder}: problems: 2, in 1 of 3 shards" in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-5], "truncated"),
        (lambda data: b"", "the index lists 4 records, read 0"),
        (lambda data: b"nothing of ours" * 9, "checksum of its length is wrong"),
        (lambda data: data + data[-16:], "truncated|checksum"),
    ],
)
def test_damaged_files_are_reported(
    folder: Path, capsys: pytest.CaptureFixture[str], change: object, message: str
) -> None:
    path = shard(folder)
    path.write_bytes(change(path.read_bytes()))  # type: ignore[operator]
    assert verify(folder) == 1
    problems = [line for line in capsys.readouterr().out.splitlines() if line[0] == "/"]
    assert problems
    assert all(line.startswith(f"{path}: ") for line in problems)
    assert any(word in line for word in message.split("|") for line in problems)


def test_missing_file_is_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard(folder).unlink()
    assert verify(folder) == 1
    assert f"{shard(folder)}: No such file or directory" in capsys.readouterr().out


def test_other_file_of_the_same_size_is_reported(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [record.data for record in record_file.records(shard(folder))]
    replace(folder, records[::-1])
    assert verify(folder) == 1
    assert "SHA-256 differs from the index" in capsys.readouterr().out


def changed(**features: by_hand.Values) -> bytes:
    """Returns the record of example 0 with changed features; an empty list removes one."""
    message = tf.train.Example.FromString(encode(example(0), FEATURES))
    for name, values in features.items():
        del message.features.feature[name]
        if values:
            other = tf.train.Example.FromString(by_hand.example(x=values))
            message.features.feature[name].CopyFrom(other.features.feature["x"])
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"label": []}, "feature 'label': missing"),
        ({"image": []}, "feature 'image': missing"),
        ({"label": [1.0]}, "feature 'label': expected int64_list, found float_list"),
        ({"label": [b"1"]}, "feature 'label': expected int64_list, found bytes_list"),
        ({"label": [1, 2]}, "feature 'label': expected 1 values, found 2"),
        ({"label": [7]}, "feature 'label': expected a label from -1 to 1, found 7"),
        ({"raw": [b"short"]}, "feature 'raw': expected 12 bytes, found 5"),
        ({"boxes": [1.0] * 5}, "feature 'boxes': expected rows of 4 values, found 5 values"),
        ({"boxes": [1] * 4}, "feature 'boxes': expected float_list, found int64_list"),
        ({"flag": [2]}, "feature 'flag': expected a bool from 0 to 1, found 2"),
        ({"image": [b"GIF89a"]}, "feature 'image': not the bytes of a png file"),
    ],
)
def test_records_of_wrong_contents_are_reported(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    features: dict[str, by_hand.Values],
    message: str,
) -> None:
    replace(folder, [changed(**features)])
    assert verify(folder) == 1
    assert f"{shard(folder)}: record at byte 0: {message}" in capsys.readouterr().out


def test_image_that_does_not_decode(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = bytearray(pictures.encoded(1))
    image[40:60] = bytes(20)
    replace(folder, [changed(image=[bytes(image)])])
    assert verify(folder, "--decode") == 1
    assert "record at byte 0: TensorFlow cannot decode it" in capsys.readouterr().out


def fuzzed(num_records: int) -> Iterator[bytes]:
    sound = [encode(example(number), FEATURES) for number in range(5)]
    draw = random.Random(0)
    for _ in range(num_records):
        record = bytearray(draw.choice(sound))
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(record))
            match draw.randrange(3):
                case 0:
                    record[at] = draw.randrange(256)
                case 1:
                    del record[at : at + draw.randrange(1, 9)]
                case _:
                    record[at:at] = draw.randbytes(draw.randrange(1, 9))
        yield bytes(record)


def test_ten_thousand_fuzzed_records(folder: Path) -> None:
    """Each record is reported or can be read."""
    replace(folder, list(fuzzed(10_000)))
    findings = verify_folder(folder, decode=False, num_workers=1)[1]
    assert findings.num_records == 10_000
    named = {problem.partition(":")[0] for problem in findings.problems}
    sound = [
        record.data
        for record in record_file.records(shard(folder))
        if f"record at byte {record.offset}" not in named
    ]
    assert 500 < len(sound) < 9_500
    batch = decode(tf.constant(sound), FEATURES, decode_images=False)
    assert batch["raw"].shape == (len(sound), 2, 3)


def test_folder_without_an_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(tmp_path) == 1
    assert "python -m pipelines.index" in capsys.readouterr().err


def test_copied_shard_is_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = json.loads((folder / "index.json").read_text())
    first = index["shards"][0]
    (folder / "copy.tfrecord").write_bytes((folder / first["name"]).read_bytes())
    index["shards"].append({**first, "name": "copy.tfrecord"})
    (folder / "index.json").write_text(json.dumps(index))
    assert verify(folder) == 1
    assert f"has the same content as {first['name']}" in capsys.readouterr().out
