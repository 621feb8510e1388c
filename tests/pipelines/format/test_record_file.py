"""Records are read as TensorFlow wrote them, and any damage of a file is detected."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines import DataError
from pipelines.format import record_file
from pipelines.format.record_file import Compression, frame
from pipelines.writing import ShardWriter

COMPRESSIONS = ("", "GZIP", "ZLIB")
DATA = [bytes([i]) * 10 * i for i in range(6)]
STARTS = [sum(16 + len(data) for data in DATA[:i]) for i in range(len(DATA))]


def write(path: Path, data: list[bytes], compression: Compression = "") -> Path:
    with ShardWriter(path, compression) as writer:
        for record in data:
            writer.write(record)
    return path


@settings(
    deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.lists(st.binary(max_size=100), max_size=5))
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_tensorflow_and_pipelines_read_each_other(
    tmp_path: Path, compression: Compression, data: list[bytes]
) -> None:
    by_pipelines = write(tmp_path / "pipelines", data, compression)
    by_tensorflow = tmp_path / "tensorflow"
    with tf.io.TFRecordWriter(str(by_tensorflow), compression) as writer:
        for record in data:
            writer.write(record)
    dataset = tf.data.TFRecordDataset(str(by_pipelines), compression)
    assert list(dataset.as_numpy_iterator()) == data
    for path in (by_pipelines, by_tensorflow):
        results = list(record_file.records(path, compression))
        assert [record.data for record in results] == data
        assert all(record.problem is None for record in results)
        if data:
            assert record_file.compression_of(path) == compression


def test_shard_describes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    with ShardWriter(path) as writer:
        for record in DATA:
            writer.write(record)
    assert writer.shard.name == "shard"
    assert writer.shard.num_records == len(DATA)
    assert writer.shard.num_bytes == path.stat().st_size == STARTS[-1] + 16 + len(DATA[-1])


def test_records_are_found_by_their_offsets(tmp_path: Path) -> None:
    path = write(tmp_path / "shard", DATA)
    assert list(record_file.offsets(path)) == STARTS
    with path.open("rb") as file:
        assert [record_file.read_at(file, offset) for offset in reversed(STARTS)] == DATA[::-1]


@pytest.mark.parametrize(
    ("byte", "problem"),
    [
        (STARTS[3], "checksum of its length is wrong"),
        (STARTS[3] + 9, "checksum of its length is wrong"),
        (STARTS[3] + 15, "checksum of its 30 bytes of data is wrong"),
        (STARTS[3] + 12 + 31, "checksum of its 30 bytes of data is wrong"),
    ],
)
def test_flipped_bit_is_found_at_its_record(tmp_path: Path, byte: int, problem: str) -> None:
    path = write(tmp_path / "shard", DATA)
    changed = bytearray(path.read_bytes())
    changed[byte] ^= 16
    path.write_bytes(changed)
    bad = [record for record in record_file.records(path) if record.problem]
    assert [record.offset for record in bad] == [STARTS[3]]
    assert problem in str(bad[0].problem)
    with path.open("rb") as file, pytest.raises(DataError, match=f"byte {STARTS[3]}: {problem}"):
        record_file.read_at(file, STARTS[3])


def test_one_changed_byte_loses_one_record(tmp_path: Path) -> None:
    """Empty records are excluded, because the search may find their own end."""
    path = write(tmp_path / "shard", DATA[1:])
    intact = path.read_bytes()
    for byte in range(len(intact)):
        changed = bytearray(intact)
        changed[byte] ^= 255
        path.write_bytes(changed)
        results = list(record_file.records(path))
        number = next(i for i in reversed(range(1, 6)) if byte >= STARTS[i] - STARTS[1])
        bad = [record.offset for record in results if record.problem]
        assert bad == [STARTS[number] - STARTS[1]]
        sound = [record.data for record in results if not record.problem]
        assert sound == [data for i, data in enumerate(DATA) if i not in (0, number)]


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_truncated_file_keeps_its_intact_records(tmp_path: Path, compression: Compression) -> None:
    path = write(tmp_path / "shard", DATA, compression)
    intact = path.read_bytes()
    for num_bytes in range(1, len(intact)):
        path.write_bytes(intact[:num_bytes])
        results = list(record_file.records(path, compression))
        sound = [record.data for record in results if record.problem is None]
        assert sound == DATA[: len(sound)]
        at_boundary = compression == "" and num_bytes in STARTS
        assert (results[-1].problem is None) == at_boundary


def test_length_beyond_the_file_allocates_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    header = (2**62).to_bytes(8, "little")
    path.write_bytes(header + frame(header)[-4:] + b"data")
    (record,) = record_file.records(path)
    assert f"truncated: 0 of {2**62} bytes" in str(record.problem)
    with pytest.raises(DataError, match="byte 0: truncated"):
        list(record_file.offsets(path))


def test_other_files_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    for foreign in (b"hello", b"\x1f\x8b" + bytes(30), b"x" * 100, b"\x78\x9c" + b"q" * 30):
        path.write_bytes(foreign)
        with pytest.raises(DataError, match="shard: not a TFRecord file"):
            record_file.compression_of(path)


@pytest.mark.parametrize("number", [2_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_fuzzed_files(number: int, tmp_path: Path) -> None:
    """Intact records are those that were written, and missing ones are reported."""
    path = write(tmp_path / "shard", DATA)
    intact, draw = path.read_bytes(), random.Random(0)
    for _ in range(number):
        changed = bytearray(intact)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(changed))
            match draw.randrange(4):
                case 0:
                    changed[at] ^= 1 << draw.randrange(8)
                case 1:
                    del changed[at : at + draw.randrange(1, 40)]
                case 2:
                    changed[at:at] = draw.randbytes(draw.randrange(1, 40))
                case _:
                    changed[at : at + 20] = changed[:20]
        path.write_bytes(changed)
        results = list(record_file.records(path))
        sound = [record.data for record in results if record.problem is None]
        assert set(sound) <= set(DATA)
        noticed = any(record.problem for record in results) or len(sound) != len(DATA)
        assert noticed or sound == DATA


def test_run_of_records_is_split_unless_a_byte_is_damaged() -> None:
    run, begins = b"".join(map(frame, DATA)), np.array(STARTS)
    assert record_file.split(run, begins) == DATA
    for place in range(len(run)):
        damaged = bytearray(run)
        damaged[place] ^= 1
        assert record_file.split(bytes(damaged), begins) is None
    for cut in (run[: STARTS[-1] + 5], run[: STARTS[2]], b"", run + b"more", run[1:]):
        assert record_file.split(cut, begins) is None
    assert record_file.split(run, np.array([*STARTS[:-2], STARTS[-2] + 1, STARTS[-1]])) is None
