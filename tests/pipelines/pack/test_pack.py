"""Packing stores every example once, with reproducible bytes, and never partial folders."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import pipelines
from pipelines.format import offsets, record_file
from pipelines.format.examples import decode
from pipelines.pack import packing
from pipelines.pack.__main__ import main
from tests.support import pictures
from tests.support.commands import wait_for
from tests.support.starting import piped

NUM_IMAGES = 30


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return pictures.write_classes(tmp_path / "source", NUM_IMAGES)


def run(*arguments: object) -> int:
    return main([*map(str, arguments), "--num-workers", "1", "--num-shards", "4"])


def examples(folder: Path) -> list[dict[str, object]]:
    index = pipelines.load_index(folder)
    return [
        {name: value.numpy() for name, value in decode(record.data, index.features).items()}
        for shard in index.shards
        for record in record_file.records(folder / shard.name, index.compression)
    ]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("compression", ["none", "GZIP", "ZLIB"])
def test_every_image_is_packed_once(source: Path, tmp_path: Path, compression: str) -> None:
    assert run(source, tmp_path / "packed", "--compression", compression) == 0
    index = pipelines.load_index(tmp_path / "packed")
    assert (offsets.OFFSETS_NAME in files(tmp_path / "packed")) == (compression == "none")
    assert [shard.num_records for shard in index.shards] == [8, 8, 7, 7]
    assert {f.name: f.label_names for f in index.features}["label"] == ("cat", "dog")
    results = sorted(examples(tmp_path / "packed"), key=lambda example: example["file"][-7:])
    for number, example in enumerate(results):
        assert example["label"] == number % 2
        expected = pictures.pixels(number, width=24 + number % 3)
        assert (example["image"] == expected).all()
    assert len(results) == NUM_IMAGES


def test_seed_decides_the_order(source: Path, tmp_path: Path) -> None:
    orders = []
    for flags in (["--seed", 1], ["--seed", 2], ["--no-shuffle"]):
        assert run(source, tmp_path / str(len(orders)), *flags) == 0
        orders.append([example["file"] for example in examples(tmp_path / str(len(orders)))])
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert orders[0] != orders[1]
    in_order = sorted(orders[2])
    assert orders[2] == [name for i in range(4) for name in in_order[i::4]]


def test_packed_folder_is_kept(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(source, tmp_path / "packed") == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "packed").iterdir()}
    assert run(source, tmp_path / "packed") == 0
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "packed").iterdir()}
    assert run(source, tmp_path / "packed", "--seed", 1) == 1
    assert "contains other data: source" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "other"),
    [
        ("--image-size 16", "--image-size 24"),
        ("--image-size 16", "--image-format jpeg"),
        ("--image-size 16", "--channels 4"),
        ("--image-size 16", "--no-shuffle"),
        ("--image-format jpeg", "--quality 50"),
    ],
)
def test_every_option_that_changes_the_bytes_is_compared(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, other: str
) -> None:
    assert run(source, tmp_path / "packed", *options.split()) == 0
    assert run(source, tmp_path / "packed", *options.split(), *other.split()) == 1
    assert "contains other data: source" in capsys.readouterr().err


def test_finished_shards_are_kept_after_an_error(source: Path, tmp_path: Path) -> None:
    last = sorted(source.rglob("*.png"))[-1]
    sound = last.read_bytes()
    damaged, times = sound[:-30], last.stat()
    last.write_bytes(damaged + bytes(30))  # of the same size and time: the same source
    os.utime(last, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert run(source, tmp_path / "packed", "--no-shuffle") == 1
    assert not (tmp_path / "packed").exists()
    finished = {p: p.stat().st_ino for p in (tmp_path / ".packed.packing/shards").iterdir()}
    assert 0 < len(finished) < 4
    last.write_bytes(sound)
    os.utime(last, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert run(source, tmp_path / "packed", "--no-shuffle") == 0
    now = {path.name: path.stat().st_ino for path in (tmp_path / "packed").iterdir()}
    for path, inode in finished.items():
        assert path.suffix == ".partial" or now[path.name] == inode
    assert run(source, tmp_path / "anew", "--no-shuffle") == 0
    assert files(tmp_path / "packed") == files(tmp_path / "anew")
    assert not (tmp_path / ".packed.packing").exists()


def test_other_options_start_from_the_beginning(source: Path, tmp_path: Path) -> None:
    bad = source / "dog" / "zzz.png"
    bad.write_bytes(b"no image")
    assert run(source, tmp_path / "packed", "--no-shuffle", "--channels", 3) == 1
    bad.unlink()
    assert run(source, tmp_path / "packed", "--seed", 3) == 0
    assert run(source, tmp_path / "anew", "--seed", 3) == 0
    assert files(tmp_path / "packed") == files(tmp_path / "anew")


def test_unreadable_image_is_named(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = source / "cat" / "004.png"
    bad.write_bytes(bad.read_bytes()[:-40])
    assert run(source, tmp_path / "packed") == 1
    assert f"error: {bad}: not a readable image" in capsys.readouterr().err


def test_full_disk_is_reported(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit of the file size simulates a full disk."""
    flags = ["--num-shards", "2", "--num-workers", "1", "--image-size", "300"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, hard))
    try:
        assert run(source, tmp_path / "packed", *flags, "--image-format", "jpeg") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    errors = capsys.readouterr().err
    assert f"error: {tmp_path / 'packed'}: File too large; free some space" in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "packed").exists()


def test_interrupt_keeps_finished_shards(source: Path, tmp_path: Path) -> None:
    """Ctrl-C reaches all processes, and finished shards equal those of one process."""
    pictures.write_classes(source, 1500)
    command = [sys.executable, "-m", "pipelines.pack", str(source), str(tmp_path / "packed")]
    flags = ["--num-shards", "64", "--num-workers", "2"]
    with piped(*command, *flags, start_new_session=True) as process:
        wait_for(lambda: any(tmp_path.glob(".packed.packing/data-*.json")))
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Stopped. Run the same command again" in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "packed").exists()
    wait_for(lambda: not group_exists(process.pid))
    for name in ("packed", "anew"):
        flags = ["--num-shards", "64", "--num-workers", "1"]
        assert main([str(source), str(tmp_path / name), *flags]) == 0
    assert files(tmp_path / "packed") == files(tmp_path / "anew")


def group_exists(number: int) -> bool:
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


def test_second_packer_raises(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".packed.packing").mkdir()
    descriptor = os.open(tmp_path / ".packed.packing", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert run(source, tmp_path / "packed") == 1
    assert "another process is packing to this folder" in capsys.readouterr().err
    os.close(descriptor)
    assert run(source, tmp_path / "packed") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nothing"], "/nothing: no such file or folder"),
        (["."], "found nothing that can be packed here; choose the format with --from"),
        (
            ["source", "--num-shards", "31"],
            "--num-shards: expected at most the number of examples, 30",
        ),
        (["source", "--num-shards", "0"], "--num-shards: expected a number above 0"),
        (["source", "--split", "train"], "--split: does not apply to images"),
        (["source", "--num-shard", "3"], "--num-shard 3. Did you mean --num-shards?"),
        (["source", "--from", "csv"], ".ndjson, .parquet, .arrow files, found none"),
    ],
)
def test_invalid_input_is_reported(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    source.rename(tmp_path / "source" if arguments[0] == "source" else tmp_path / ".hidden")
    assert main([arguments[0], "packed", "--num-workers", "1", *arguments[1:]]) == 1
    errors = capsys.readouterr().err
    assert "error: " in errors
    assert message in errors
    assert not (tmp_path / "packed").exists()


def test_a_file_is_no_folder(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file.csv"
    file.write_text("")
    assert run(source, file) == 1
    assert "file.csv: expected a folder, found a file" in capsys.readouterr().err
    with pytest.raises(pipelines.DataError, match=r"file\.csv/index\.json: .* found no such file"):
        pipelines.load_index(file)


@pytest.mark.parametrize(
    ("count", "num_bytes", "expected"),
    [(5, 100, 1), (200, 10**5, 2), (1000, 10**5, 10), (20000, 10**5, 21), (3, 4 * 10**7, 3)],
)
def test_number_of_shards_follows_from_the_size(count: int, num_bytes: int, expected: int) -> None:
    class Texts:
        features = (pipelines.Feature(name="text", dtype="string", encoding="bytes"),)

        def __len__(self) -> int:
            return count

        def examples(self, numbers: Sequence[int]) -> Iterator[dict[str, object]]:
            assert len(numbers) <= 32
            return ({"text": b" " * num_bytes} for _ in numbers)

    assert packing.default_num_shards(Texts()) == expected  # type: ignore[arg-type]


def test_small_data_are_one_shard(source: Path, tmp_path: Path) -> None:
    assert main([str(source), str(tmp_path / "packed"), "--num-workers", "1"]) == 0
    assert pipelines.load_index(tmp_path / "packed").num_shards == 1
