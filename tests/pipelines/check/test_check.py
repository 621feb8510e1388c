"""The check of reading once passes for correct readers and fails for others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from pipelines.check import main
from pipelines.pack.__main__ import main as pack
from pipelines.reading.read import read
from tests.support import numbers


@pytest.mark.parametrize(("num_workers", "shuffle_buffer"), [(1, 0), (4, 10)])
def test_each_record_is_read_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_workers: int, shuffle_buffer: int
) -> None:
    numbers.write(tmp_path / "data", num_records=50, num_shards=3)
    flags = [f"--num-workers={num_workers}", f"--shuffle-buffer={shuffle_buffer}"]
    assert main([str(tmp_path / "data"), *flags, "--batch-size=4"]) == 0
    assert "Each of 50 records was read exactly once" in capsys.readouterr().out


def test_equal_records_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("same\n" * 9 + "other\n")
    command = [str(tmp_path / "a.txt"), str(tmp_path / "data"), "--num-shards=2"]
    assert pack([*command, "--num-workers=1"]) == 0
    assert main([str(tmp_path / "data"), "--num-workers=2"]) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.skip(1), "1 records were never read, 0 were read again"),
        (
            lambda data: data.concatenate(data.take(2)),
            "0 records were never read, 2 were read again",
        ),
        (
            lambda data: data.skip(1).concatenate(tf.data.Dataset.from_tensors([7]).map(long)),
            "1 records were never read, 1 were read again",
        ),
    ],
)
def test_wrong_reading_is_detected(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: Any,
    message: str,
) -> None:
    def wrong(*arguments: Any, **options: Any) -> tf.data.Dataset:
        return change(read(*arguments, **options).unbatch()).batch(4)

    numbers.write(tmp_path / "data", num_records=10, num_shards=2)
    monkeypatch.setattr("pipelines.reading.read.read", wrong)
    assert main([str(tmp_path / "data"), "--num-epochs=1"]) == 1
    assert message in capsys.readouterr().err


def long(number: tf.Tensor) -> tf.Tensor:
    return tf.cast(number[0], tf.int64)


def test_damaged_record_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = numbers.write(tmp_path / "data", num_records=4, num_shards=1)
    path = numbers.damage_first_record(tmp_path / "data", index)
    assert main([str(tmp_path / "data")]) == 1
    assert f"error: {path}: record at byte 0: checksum" in capsys.readouterr().err
