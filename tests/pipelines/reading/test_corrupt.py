"""Damaged data are reported with file and byte while reading, or skipped and counted."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import pipelines
import tfdist
from pipelines.format import record_file
from pipelines.format.encoding import encode
from pipelines.index.__main__ import main as index
from pipelines.reading.blocks import records_per_block
from pipelines.verify import main as verify
from tests.support import numbers, starting


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    numbers.write(tmp_path, num_records=100, num_shards=4)
    pipelines.read(tmp_path, 10)  # writes the offsets beside the shards
    return tmp_path


def flip(path: Path, byte: int, *records: int) -> list[int]:
    """Flips a bit of records at a byte offset, and returns the offsets of the records."""
    begins, data = list(record_file.offsets(path)), bytearray(path.read_bytes())
    for record in records:
        data[begins[record] + byte] ^= 16
    path.write_bytes(data)
    return [begins[record] for record in records]


@pytest.mark.parametrize("byte", [0, 9, 20])  # of the length, of its checksum, of the data
@pytest.mark.parametrize("shuffle_buffer", [0, 40])
def test_record_is_named(folder: Path, byte: int, shuffle_buffer: int) -> None:
    (begin,) = flip(numbers.shard(folder, 2), byte, 7)
    dataset = pipelines.read(folder, 10, shuffle_buffer=shuffle_buffer, seed=1)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=f"{numbers.shard(folder, 2)}: record at byte {begin}: ",
    ):
        numbers.order(dataset)


@pytest.mark.parametrize("byte", [0, 9, 20])
@pytest.mark.parametrize("shuffle_buffer", [0, 40])
def test_records_are_skipped_and_counted(
    folder: Path, byte: int, shuffle_buffer: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Record i of shard s is number 4 i + s. Only damaged records are missing."""
    flip(numbers.shard(folder, 2), byte, 7, 8, 24)
    dataset = pipelines.read(folder, 10, shuffle_buffer=shuffle_buffer, seed=1, on_corrupt="skip")
    with caplog.at_level(logging.WARNING, "pipelines"):
        seen = numbers.order(dataset)
    assert sorted(seen) == sorted(set(range(100)) - {30, 34, 98})
    assert len(caplog.messages) == 3
    assert str(numbers.shard(folder, 2)) in caplog.messages[0]
    assert caplog.messages[-1].endswith("skipped, 3 so far")


def test_damaged_length_without_offsets_is_named_at_once(folder: Path) -> None:
    (folder / "offsets.npz").unlink()
    flip(numbers.shard(folder, 1), 0, 5)
    with pytest.raises(pipelines.DataError, match=f"{numbers.shard(folder, 1)}: record at byte"):
        pipelines.read(folder, 10)


def test_shard_that_vanishes_while_reading_is_named(folder: Path) -> None:
    dataset = pipelines.read(folder, 10)
    assert len(numbers.order(dataset)) == 100
    lost = numbers.shard(folder, 3)
    lost.unlink()
    with pytest.raises(tf.errors.NotFoundError, match=str(lost)):
        numbers.order(dataset)


def test_offsets_of_other_shards_are_replaced(folder: Path) -> None:
    table = (folder / "offsets.npz").read_bytes()
    other = folder / "other"
    numbers.write(other, num_records=80, num_shards=4)
    (other / "offsets.npz").write_bytes(table)
    assert sorted(numbers.order(pipelines.read(other, 10))) == list(range(80))
    (other / "offsets.npz").write_bytes(table[:100])
    assert sorted(numbers.order(pipelines.read(other, 10))) == list(range(80))


def test_folder_that_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "offsets.npz").unlink()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr("numpy.savez", refuse)
    assert sorted(numbers.order(pipelines.read(folder, 10))) == list(range(100))
    assert not list(folder.glob("*offsets*"))


#: Reads a compressed folder, one shard of which vanishes after the first check that it exists.
_READ_VANISHING = """
import sys
from pathlib import Path
import pipelines
import tensorflow as tf
from pipelines.reading import block_reader

folder, lost = sys.argv[1:]
real, checks = block_reader._opened, []

def passes(path):
    is_lost = path.numpy().decode() == lost
    checks.extend([path] * is_lost)
    return is_lost and len(checks) == 1

def opened(path):
    asked = tf.data.Dataset.from_tensors(path)
    asked = asked.filter(lambda path: tf.logical_not(tf.py_function(passes, [path], tf.bool)))
    return asked.flat_map(real)

block_reader._opened = opened
dataset = pipelines.read(folder, 7)
Path(lost).unlink()
try:
    list(dataset)
except tf.errors.OpError as error:
    assert checks and lost in str(error), (checks, error)
else:
    raise AssertionError("no error")
"""


def test_compressed_shard_that_vanishes_ends_the_reading(tmp_path: Path) -> None:
    numbers.write(tmp_path, num_records=60, num_shards=3)
    lost = tmp_path / numbers.compress(tmp_path, "GZIP").shards[1].name
    starting.run(sys.executable, "-c", _READ_VANISHING, str(tmp_path), str(lost))


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_damage_in_compressed_shards_raises(tmp_path: Path, compression: str) -> None:
    numbers.write(tmp_path, num_records=60, num_shards=3)
    index = numbers.compress(tmp_path, compression)
    whole = pipelines.read(tmp_path, 7, shuffle_buffer=15, seed=1)
    begun = pipelines.read(tmp_path, 7, shuffle_buffer=15, seed=1, start=pipelines.Position(0, 4))
    expected = numbers.order(whole)
    assert sorted(expected) == list(range(60))
    assert numbers.order(begun) == expected[28:]
    with pytest.raises(ValueError, match="on_corrupt: expected 'raise'"):
        pipelines.read(tmp_path, 7, on_corrupt="skip")
    path = tmp_path / index.shards[1].name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"{path}: corrupt or truncated"):
        numbers.order(whole)


def rewrite_offsets(folder: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    with np.load(folder / "offsets.npz") as archive:
        table, of = archive["offsets"], archive["of"]
    np.savez(folder / "offsets.npz", offsets=change(table), of=of)


def test_changed_offsets_never_give_a_record_twice(tmp_path: Path) -> None:
    index = numbers.write(tmp_path, num_records=10_000, num_shards=4)
    size = records_per_block(index, shuffle_buffer=160)
    assert size < 2500

    def shifted(table: np.ndarray) -> np.ndarray:
        """The second block begins one record early, and the offsets still increase."""
        table[size - 1 : size + 1] = table[size - 1] - 1, table[size - 1]
        return table

    def read() -> list[int]:
        return numbers.order(pipelines.read(tmp_path, 100, shuffle_buffer=160, seed=1))

    pipelines.read(tmp_path, 10)
    for change in (lambda table: table[:-5], lambda table: np.roll(table, 1), np.zeros_like):
        rewrite_offsets(tmp_path, change)
        assert sorted(read()) == list(range(10_000))
    assert verify([str(tmp_path), "--num-workers", "1"]) == 0
    rewrite_offsets(tmp_path, shifted)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"restore|delete offsets\.npz"):
        read()
    assert verify([str(tmp_path), "--num-workers", "1"]) == 1


_PNG = [
    pipelines.Feature(name="image", dtype="uint8", shape=(4, 4, 3), encoding="png"),
    pipelines.Feature(name="label", dtype="int64", encoding="list"),
]


def damaged_image(number: int) -> list[dict[str, object]]:
    """Returns examples, of which one has an image that is cut off. Its record is intact."""
    values = [tf.fill((4, 4, 3), tf.constant(i, tf.uint8)) for i in range(9)]
    images = [tf.io.encode_png(value).numpy() for value in values]
    images[number] = images[number][:40]
    return [{"image": image, "label": i} for i, image in enumerate(images)]


def test_images_that_cannot_be_decoded_are_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipelines.write_shards(damaged_image(4), tmp_path / "png", _PNG, num_shards=2, source="test")
    dataset = pipelines.read(tmp_path / "png", 4, shuffle_buffer=8, seed=1, on_corrupt="skip")
    with caplog.at_level(logging.WARNING, "pipelines"):
        values = [int(x) for batch in dataset for x in batch["image"][:, 0, 0, 0]]
    assert sorted(values) == [0, 1, 2, 3, 5, 6, 7, 8]
    (message,) = caplog.messages
    assert message.endswith(
        "data-00000-of-00002.tfrecord: record 2: an image cannot be decoded; skipped, 1 so far"
    )


@pytest.mark.parametrize("options", [{"shuffle_buffer": 8}, {"cache": "memory"}])
def test_a_training_names_the_record_of_an_image_that_cannot_be_decoded(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Nothing checked the images of other tools' records, and TensorFlow's error has no names."""
    with tf.io.TFRecordWriter(str(tmp_path / "x.tfrecord")) as writer:
        for example in damaged_image(7):
            writer.write(encode(example, _PNG))
    assert index([str(tmp_path), "--num-workers", "1"]) == 0
    assert "damaged image as 'image', a guess: 1" in str(pipelines.load_account(tmp_path))
    data = pipelines.read(tmp_path, 2, seed=1, map_fn=lambda e: (e["image"], e["label"]), **options)

    def build_model() -> keras.Model:
        layers = [keras.Input((4, 4, 3)), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
        return model

    with pytest.raises(tfdist.errors.DataError, match=r"x\.tfrecord: record 7: .*PNG.*skip"):
        tfdist.Trainer(build_model, strategy="mirrored").fit(data, verbose=0)
