"""Tar files of the WebDataset layout are packed with their images, labels and other members."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines import DataError
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
