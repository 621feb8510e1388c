"""Tar files of the WebDataset layout are packed with their images, labels and other members."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from pipelines import DataError
from pipelines.sources import open_source
from pipelines.sources.source import Options
from tests.support import opened, pictures
from tests.support.opened import write_tar


def test_members_become_features(tmp_path: Path) -> None:
    images = [pictures.encoded(i) for i in range(4)]
    for tar in range(2):
        members: dict[str, bytes] = {}
        for i in (2 * tar, 2 * tar + 1):
            members |= {f"train/{i}.png": images[i], f"train/{i}.cls": b"%d\n" % i}
            members |= {f"train/{i}.meta.json": b'{"n": %d}' % i}
        write_tar(tmp_path / f"{tar}.tar", members)
    source = opened.source(tmp_path)
    assert [feature.name for feature in source.features] == ["key", "image", "label", "meta.json"]
    assert len(source) == 4
    for number, example in zip([3, 0], source.examples([3, 0]), strict=True):
        assert example == {
            "key": f"train/{number}",
            "image": images[number],
            "label": number,
            "meta.json": b'{"n": %d}' % number,
        }
    (resized,) = opened.source(tmp_path / "0.tar", "webdataset", image_size="4x4").examples([1])
    assert resized["image"] != images[1]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"a.txt": b"1", "b.txt": b"2", "b.cls": b"1"}, r"b: 'cls' is not in every example"),
        ({"a.txt": b"1", "b.txt": b"2", "a.cls": b"3", "b.cls": b"4"}, "beside each other"),
        ({"a.cls": b"cat"}, r"a\.cls: expected a class number, got b'cat'"),
        ({"a.png": b"no image"}, r"a\.png: not a readable image"),
        ({"a.png": b"1", "a.jpg": b"2"}, "expected one image in an example, found jpg, png"),
        ({"README": b"text"}, "expected tar files with examples, found none"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, members: dict[str, bytes], message: str) -> None:
    path = write_tar(tmp_path / "a.tar", members)
    with pytest.raises(DataError, match=message):
        list(opened.source(path).examples([0]))


def test_truncated_and_foreign_files_are_named(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"a.txt": bytes(5000)})
    source = opened.source(path)
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(DataError, match=r"a\.tar: ends within a\.txt"):
        list(source.examples([0]))
    path.write_bytes(b"no tar")
    with pytest.raises(DataError, match=r"a\.tar: not a readable tar file"):
        opened.source(path)


def test_names_of_members_do_not_collide_with_features(tmp_path: Path) -> None:
    members = {"a.PNG": pictures.encoded(1), "a.Cls": b"3", "a.key": b"k", "a.image": b"i"}
    source = opened.source(write_tar(tmp_path / "a.TAR", members | {"a.label": b"l"}))
    (example,) = source.examples([0])
    assert dict(example) == {
        "key": "a", "image": members["a.PNG"], "label": 3,
        ".key": b"k", ".image": b"i", ".label": b"l",
    }  # fmt: skip


def test_links_and_sparse_members_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    with (folder / "0.bin").open("wb") as file:
        file.write(b"A" * 4096)
        file.seek(1 << 20)
        file.write(b"B" * 4096)
    sparse = (folder / "0.bin").read_bytes()
    (folder / "1.bin").write_bytes(b"one")
    (folder / "2.bin").hardlink_to(folder / "1.bin")
    (folder / "3.bin").symlink_to("1.bin")
    (folder / "4.bin").symlink_to("/etc/hostname")
    names = sorted(path.name for path in folder.iterdir())
    for kind in ("pax", "gnu"):
        tar = tmp_path / f"{kind}.tar"
        command = ["tar", "--sparse", f"--format={kind}", "-cf", str(tar), "-C", str(folder)]
        subprocess.run([*command, *names], check=True)
        source = open_source(str(tar), "auto", Options())
        assert [e["bin"] for e in source.examples(range(4))] == [sparse, b"one", b"one", b"one"]
        fates = source.account.kinds["members"]
        assert (fates.found, fates.used) == (5, 4)
        assert fates.left_out["link to something outside"].examples == ["4.bin"]


def test_nothing_behind_damage_or_an_end_is_lost(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {f"{i}.txt": b"%d" % i for i in range(4)})
    whole = path.read_bytes()
    path.write_bytes(whole + whole)
    source = open_source(str(path), "auto", Options())
    assert len(source) == 8
    assert source.account.kinds["keys"].changed["are those of several examples"].count == 4
    damaged = bytearray(whole)
    damaged[2048 + 148] ^= 1  # the checksum of the third header
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"a\.tar: damaged at byte 2048: no header"):
        opened.source(path)


def test_members_that_are_left_out_are_counted(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"._a.txt": b"", "README": b"", ".b": b"", "a.txt": b""})
    with tarfile.open(path, "a") as archive:
        archive.addfile(tarfile.TarInfo(os.fsdecode(b"caf\xe9.txt")), io.BytesIO())
    source = open_source(str(path), "auto", Options())
    fates = source.account.kinds["members"]
    assert (fates.found, fates.used, fates.clutter) == (5, 2, 1)
    assert fates.left_out["without name or suffix"].examples == ["README", ".b"]
    assert opened.examples(source)[1]["key"] == b"caf\xe9"
